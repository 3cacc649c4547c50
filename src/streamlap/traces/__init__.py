"""Timelines: recording, figures, pictures."""
