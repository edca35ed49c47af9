#include "trainer/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace palimpsest {

namespace {

int64_t wsd_decay_steps(const ScheduleConfig& schedule, int64_t total_steps) {
  return schedule.decay_steps.value_or(total_steps / 5 + (total_steps % 5 != 0 ? 1 : 0));
}

}  // namespace

double learning_rate(const ScheduleConfig& schedule, double peak, int64_t step, int64_t total_steps) {
  CHECK(step >= 1, "steps count from 1, got ", step);
  CHECK(total_steps >= 1, "a run has at least one step, got ", total_steps);
  step = std::min(step, total_steps);
  const int64_t warmup = schedule.warmup_steps;
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  const auto part_since = [&](int64_t begin) {  // 0 at `begin`, 1 at the last step
    return static_cast<double>(step - begin) / static_cast<double>(total_steps - begin);
  };
  // As a weighted mean, which gives the two ends exactly.
  const auto between = [&](double u) { return peak * (1 - u) + schedule.min_lr * u; };
  switch (schedule.kind) {
    case ScheduleKind::kCosine:
      return between((1 - std::cos(std::numbers::pi * part_since(warmup))) / 2);
    case ScheduleKind::kLinear:
      return between(part_since(warmup));
    case ScheduleKind::kWsd: {
      const int64_t begin = std::max(warmup, total_steps - wsd_decay_steps(schedule, total_steps));
      return step <= begin ? peak : between(part_since(begin));
    }
    case ScheduleKind::kConstant:
      break;
  }
  return peak;
}

std::vector<std::string> schedule_notices(const ScheduleConfig& schedule, int64_t total_steps) {
  std::vector<std::string> notices;
  if (schedule.warmup_steps > total_steps) {
    notices.push_back(fmt::format(
        "the run ends at step {}, within the {} steps of schedule.warmup_steps: optimizer.lr is not reached",
        total_steps, schedule.warmup_steps));
  } else if (schedule.kind == ScheduleKind::kWsd && schedule.decay_steps &&
             *schedule.decay_steps > total_steps - schedule.warmup_steps) {
    notices.push_back(
        fmt::format("schedule.decay_steps is {}, but warm-up leaves {} of {} steps: the decay is cut to them",
                    *schedule.decay_steps, total_steps - schedule.warmup_steps, total_steps));
  }
  if (total_steps == 1 && schedule.min_lr == 0.0 && learning_rate(schedule, 1.0, 1, 1) == 0.0)
    notices.emplace_back(
        "the run's one step is the last, whose learning rate is schedule.min_lr = 0: nothing is learnt; set "
        "schedule.kind to constant, or give more steps");
  return notices;
}

}  // namespace palimpsest
