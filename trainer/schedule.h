// The learning rate: a pure function of the optimizer step, so that a resumed run needs nothing but the step's number.
//
// Steps count from 1 to N = total_steps. With the peak P = optimizer.lr, W = warmup_steps and M = min_lr, step s has
//
//   P * s / W                                      s <= W   (every kind; step 1 is not 0, step W is P)
//   cosine     M + (P - M) (1 + cos(pi u)) / 2     u = (s - W) / (N - W)
//   linear     P + (M - P) u                       the same u
//   wsd        P + (M - P) max(0, u)               u = (s - D) / (N - D), the decay's begin D = max(W, N - decay_steps)
//   constant   P
//
// so step N has exactly M (P where N <= W, and with constant or decay_steps: 0). Without a decay_steps, wsd decays over
// the last fifth of N, rounded up. Steps beyond N stay at the value of N. A resume with another N, W, M or kind follows
// the new formula from the step that it continues with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/config.h"

namespace palimpsest {

// step and total_steps are at least 1.
double learning_rate(const ScheduleConfig& schedule, double peak, int64_t step, int64_t total_steps);

// What a reader of the log should know: a run that ends within the warm-up, a decay that was cut by it, a run that
// learns nothing.
std::vector<std::string> schedule_notices(const ScheduleConfig& schedule, int64_t total_steps);

}  // namespace palimpsest
