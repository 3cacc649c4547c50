"""Handwritten digits, trained in four ways: plain, with prefetched batches, with offloaded
activations, with both. Each way is two changed lines, and the losses are the same to the last bit.

    python examples/digits_prefetch.py [--device cuda] [--epochs 2]

Needs scikit-learn, for the data (8x8 pixels, 1797 images).
"""

import argparse
import contextlib
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import streamlap


def digits() -> TensorDataset:
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    return TensorDataset(images, torch.from_numpy(data.target))


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * 4 * 4, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def train(device: str, epochs: int, prefetch: bool, offload: bool) -> tuple[list[float], float]:
    """Return the loss of each step, and the share of images that are recognised in the end."""
    torch.manual_seed(0)
    data = digits()
    loader = DataLoader(data, batch_size=128, shuffle=True)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    # The two helpers. Without them, each batch is copied when its turn comes, and what forward
    # saves stays on the device.
    batches = streamlap.Prefetcher(loader, device) if prefetch else loader
    saving = streamlap.offload_activations(min_bytes=1) if offload else contextlib.nullcontext()

    losses = []
    for _ in range(epochs):
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)  # prefetched: there already
            with saving:
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        images, labels = (tensor.to(device) for tensor in data.tensors)
        right = (model(images).argmax(1) == labels).float().mean().item()
    return torch.stack(losses).tolist(), right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # or two plain runs would differ, too

    plain, right = train(given.device, given.epochs, prefetch=False, offload=False)
    print(f"plain: {len(plain)} steps, last loss {plain[-1]:.4f}, {right:.1%} recognised")
    same = True
    for prefetch, offload in ((True, False), (False, True), (True, True)):
        losses, _ = train(given.device, given.epochs, prefetch, offload)
        name = " and ".join(["prefetched"] * prefetch + ["offloaded"] * offload)
        print(f"{name}: the losses are {'the same' if losses == plain else 'OTHERS'}, bit for bit")
        same = same and losses == plain
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
