// Bias, bans and what ends a sequence too early on a CPU: what engine/sampling/logit_bias.py has of XLA's operations, as one call.

#pragma once

#include <vector>

#include "step_rows.h"

namespace odriver {

constexpr float kRemoved = -1e30f;
constexpr int32_t kAny = -1;  // at the front of a ban's prefix

// The tokens of a row that are not to be drawn.
struct Strikes {
  float* logits;
  int64_t vocab;

  // By minimum, so that a token that is not allowed stays below a banned one, and NaN stays NaN.
  void strike(int64_t token) const {
    if (token >= 0 && token < vocab && logits[token] > kRemoved) logits[token] = kRemoved;
  }
};

// (logits f32[rows, vocab], inputs s32[fields, rows], then of all slots values f32[slots, vocab], recent s32[slots, n],
// banned_ids s32[slots, bans], banned_after s32[slots, bans, n], hidden_ids s32[slots, m], hidden_until s32[slots], and what
// rows are fed) -> (the same recent tokens with the new ones, changed logits)
inline const char* bias(const Call& call) {
  const Buffer logits = call.arg(0), values = call.arg(2), banned = call.arg(4), hidden = call.arg(6), out = call.result(1);
  int32_t* recent = static_cast<int32_t*>(call.result(0).data());
  if (recent != call.arg(3).data()) return "XLA has copied the recent tokens";
  const StepRows rows(call, call.arg(1), 8);
  const int64_t vocab = logits.dim(1), length = call.arg(3).dim(1), bans = banned.dim(1), hides = hidden.dim(1);
  by_piece(logits, [&](int64_t row, int64_t begin, int64_t size) {
    const float* from = logits.floats() + row * vocab + begin;
    float* to = out.floats() + row * vocab + begin;
    if (!rows.changes(row)) {
      std::copy(from, from + size, to);
      return;
    }
    const float* added = values.floats() + rows.slot(row) * vocab + begin;
    for (int64_t at = 0; at < size; ++at) to[at] = from[at] + added[at];
  });
  // A slot's rows read its tokens as they were before the step.
  std::vector<int32_t> now(rows.count() * length);
  parallel_for(rows.count(), [&](int64_t row) {
    if (!rows.changes(row)) return;
    const int64_t slot = rows.slot(row), num_new = std::min(rows.num_new(row), length);
    int32_t* last = now.data() + row * length;
    std::copy(recent + slot * length + num_new, recent + (slot + 1) * length, last);
    for (int64_t back = 0; back < num_new; ++back) last[length - 1 - back] = rows.new_token(row, back);
    const Strikes strikes{out.floats() + row * vocab, vocab};
    for (int64_t ban = slot * bans; ban < (slot + 1) * bans; ++ban) {
      const int32_t* after = call.arg(5).ints() + ban * length;
      const auto meets = [](int32_t asked, int32_t token) { return asked == kAny || asked == token; };
      if (banned.ints()[ban] < vocab && std::equal(after, after + length, last, meets)) strikes.strike(banned.ints()[ban]);
    }
    if (rows.position(row) >= call.arg(7).ints()[slot]) return;
    for (int64_t at = slot * hides; at < (slot + 1) * hides; ++at) strikes.strike(hidden.ints()[at]);
  });
  for (int64_t row = 0; row < rows.count(); ++row)
    if (rows.changes(row) && rows.owns(row))
      std::copy_n(now.data() + row * length, length, recent + rows.slot(row) * length);
  return nullptr;
}

}  // namespace odriver
