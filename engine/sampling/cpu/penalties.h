// Presence, frequency and repetition penalties on a CPU: what engine/sampling/penalties.py has of XLA's operations, as one call.
// XLA copies the counts of all slots to add a few to them.

#pragma once

#include "step_rows.h"
#include "tiles.h"

namespace odriver {

constexpr int32_t kGenerated = 2;  // is added to a token's count each time; 1 if the prompt has it

struct Penalty {
  float presence, frequency, repetition;

  Vector of(Vector logits, Integers counts) const {
    const Vector strength = counts > 0 ? spread(repetition) : spread(1);
    const Vector times = __builtin_convertvector(counts / kGenerated, Vector);
    const Vector repeated = logits > 0 ? logits / strength : logits * strength;
    return repeated - frequency * times - (times > 0 ? spread(presence) : Vector{});
  }
  float of(float logit, int32_t count) const { return of(spread(logit), Integers{} + count)[0]; }

  void write(const float* logits, const int32_t* counts, int64_t size, float* out) const {
    int64_t at = 0;
    for (; at + kWidth <= size; at += kWidth) {
      Integers some;
      std::memcpy(&some, counts + at, sizeof some);
      store(out + at, of(load(logits + at), some));
    }
    for (; at < size; ++at) out[at] = of(logits[at], counts[at]);
  }
};

// (logits f32[rows, vocab], inputs s32[fields, rows], counts s32[slots, vocab], presence, frequency and repetition f32[slots],
// what rows are fed) -> (the same counts with the new tokens, penalised logits)
inline const char* penalties(const Call& call) {
  const Buffer logits = call.arg(0), out = call.result(1);
  int32_t* counts = static_cast<int32_t*>(call.result(0).data());
  if (counts != call.arg(2).data()) return "XLA has copied the counts of tokens";
  const StepRows rows(call, call.arg(1), 6);
  const int64_t vocab = logits.dim(1);
  const auto penalty_of = [&](int64_t row) {
    const int64_t slot = rows.slot(row);
    return Penalty{call.arg(3).floats()[slot], call.arg(4).floats()[slot], call.arg(5).floats()[slot]};
  };
  by_piece(logits, [&](int64_t row, int64_t begin, int64_t size) {
    const float* from = logits.floats() + row * vocab + begin;
    float* to = out.floats() + row * vocab + begin;
    if (rows.changes(row)) penalty_of(row).write(from, counts + rows.slot(row) * vocab + begin, size, to);
    else std::copy(from, from + size, to);
  });
  // A slot's rows read its counts as they were before the step.
  const auto for_new = [&](int64_t row, const auto& act) {
    if (!rows.changes(row)) return;
    int32_t* own = counts + rows.slot(row) * vocab;
    for (int64_t back = 0; back < rows.num_new(row); ++back)
      if (const int64_t token = rows.new_token(row, back); token >= 0 && token < vocab) act(own, token);
  };
  for (int64_t row = 0; row < rows.count(); ++row)
    for_new(row, [&](const int32_t* own, int64_t token) {
      int32_t count = own[token];
      for_new(row, [&](const int32_t*, int64_t other) { count += other == token ? kGenerated : 0; });
      out.floats()[row * vocab + token] = penalty_of(row).of(logits.floats()[row * vocab + token], count);
    });
  for (int64_t row = 0; row < rows.count(); ++row)
    if (rows.owns(row)) for_new(row, [](int32_t* own, int64_t token) { own[token] += kGenerated; });
  return nullptr;
}

}  // namespace odriver
