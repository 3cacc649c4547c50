// Medians and spread of samples.
#pragma once

#include <algorithm>
#include <vector>

namespace bench {

inline double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t middle = samples.size() / 2;
  return samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
}

inline double least(const std::vector<double>& samples) {
  return *std::min_element(samples.begin(), samples.end());
}

inline double most(const std::vector<double>& samples) {
  return *std::max_element(samples.begin(), samples.end());
}

}  // namespace bench
