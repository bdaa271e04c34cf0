// One row's next token: the filters and their order, of the loops in sample_table.h.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "sample_select.h"
#include "sample_table.h"
#include "scratch.h"

namespace hexserve {

struct RowSampling {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  NoiseOf noise;
};

struct RowScores {
  float logprob;
  int32_t* top_ids;     // [best]
  float* top_logprobs;  // [best]
};

class RowSampler {
 public:
  RowSampler(const SampleTable& table, Scratch& scratch, int64_t vocab)
      : table_(table), vocab_(vocab) {
    const int64_t room = vocab + kListSlack;
    scratch.reset(3 * Scratch::bytes_of<float>(room) + 2 * Scratch::bytes_of<int32_t>(room) +
                  Scratch::bytes_of<Mass>(LeastKept::kBuckets));
    changed_ = scratch.take<float>(room);
    values_ = scratch.take<float>(room);
    weights_ = scratch.take<float>(room);
    ids_ = scratch.take<int32_t>(room);
    places_ = scratch.take<int32_t>(room);
    buckets_ = scratch.take<Mass>(LeastKept::kBuckets);
  }

  // The logits plus values[i] at ids[i]; ids outside of the vocabulary are left out. Valid until the
  // next row.
  const float* bias(const float* logits, const int32_t* ids, const float* values, int64_t n) {
    std::copy_n(logits, vocab_, changed_);
    for (int64_t i = 0; i < n; ++i) {
      if (ids[i] >= 0 && ids[i] < vocab_) changed_[ids[i]] += values[i];
    }
    return changed_;
  }

  // Takes what `bias` gave, too. Valid until the next row.
  const float* penalize(const float* logits, const int32_t* counts, Penalties penalties) {
    table_.penalize(logits, counts, penalties, changed_, vocab_);
    return changed_;
  }

  int32_t choose(const float* logits, const RowSampling& own) {
    const Largest likeliest = table_.largest(logits, vocab_);
    if (!(own.temperature > 0)) return int32_t(likeliest.index);
    // No distribution: the reference, too, leaves no token then.
    if (!std::isfinite(likeliest.value)) return 0;
    // What is below could not be drawn, or has no mass that would count for top-p.
    float least = own.top_p < 1 ? kMasslessBelow : kHopelessBelow;
    if (own.min_p > 0) least = std::max(least, table_.log(own.min_p));
    int64_t left = table_.scale(logits, vocab_, {likeliest.value, own.temperature, least}, values_, ids_);
    if (own.top_k > 0 && own.top_k < left) {
      const auto one = [](int64_t) { return Mass(1); };
      left = keep(left, one, [&](Mass) { return Mass(own.top_k); });
    }
    if (own.top_p < 1 && left > 0) {
      table_.weigh(values_, left, 0, weights_);
      const auto mass_at = [this](int64_t place) { return mass_of(weights_[place]); };
      left = keep(left, mass_at, [&](Mass total) {
        return std::max(Mass(1), Mass(std::ceil(double(own.top_p) * double(total))));
      });
    }
    return table_.draw(values_, ids_, left, own.noise);
  }

  // Log-probabilities of `token` and of the `best` likeliest.
  void score(const float* logits, int32_t token, int64_t best, RowScores& scores) {
    const float most = table_.largest(logits, vocab_).value;
    float log_total = 0;  // of e^(logit - most); where `most` is not finite, nothing is but NaN and -inf
    if (std::isfinite(most)) {
      table_.weigh(logits, vocab_, most, weights_);
      const auto add = [](Mass total, float weight) { return total + mass_of(weight); };
      log_total = table_.log(float(std::accumulate(weights_, weights_ + vocab_, Mass(0), add)) / kWhole);
    }
    const auto logprob = [&](int32_t id) { return logits[id] - most - log_total; };
    scores.logprob = logprob(token);
    find_best(logits, best, scores.top_ids);
    std::transform(scores.top_ids, scores.top_ids + best, scores.top_logprobs, logprob);
  }

 private:
  static constexpr float kHopelessBelow = -19.5f;  // noise is within (-2.82, 16.64)
  static constexpr float kMasslessBelow = -28.0f;  // e^-28 * kWhole < 1

  // Keeps the likeliest of the first `n` tokens that weigh enough, and what ties with the last of
  // them; returns how many. See LeastKept::find.
  template <typename MassAt, typename GoalOf>
  int64_t keep(int64_t n, MassAt mass_at, GoalOf goal_of) {
    const float least = LeastKept(table_, places_, buckets_).find(values_, n, mass_at, goal_of);
    return table_.keep(values_, ids_, n, least);
  }

  // The likeliest first, of equals the lowest id; NaN goes before all else.
  void find_best(const float* logits, int64_t best, int32_t* ids) const {
    const auto is_before = [&](int32_t a, int32_t b) {
      return logits[a] > logits[b] || (std::isnan(logits[a]) && !std::isnan(logits[b]));
    };
    int64_t found = 0;
    for (int64_t i = 0; i < vocab_; ++i) {
      if (found == best) i = table_.find_above(logits, i, vocab_, logits[ids[best - 1]]);
      if (i == vocab_) return;
      const int32_t id = int32_t(i);
      int32_t* const end = ids + found;
      int32_t* const place = std::upper_bound(ids, end, id, is_before);
      if (place == ids + best) continue;
      std::move_backward(place, std::min(end, ids + best - 1), std::min(end + 1, ids + best));
      *place = id;
      found = std::min(found + 1, best);
    }
  }

  const SampleTable& table_;
  const int64_t vocab_;
  float *changed_, *values_, *weights_;
  int32_t *ids_, *places_;
  Mass* buckets_;
};

}  // namespace hexserve
