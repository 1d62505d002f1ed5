// A step's rows as what changes their logits is told of them: engine/sampling/sampler_inputs.py, and new_tokens.py.

#pragma once

#include <algorithm>
#include <cstring>

#include "handler.h"
#include "team.h"

namespace odriver {

constexpr int64_t kPiece = 4096;  // tokens of a row that are one task; whole vectors

// SamplerInputs' fields, by their numbers.
enum Field : int64_t {
  kSlots, kSamples, kDecodes, kPositions, kTemperature, kTopK, kTopP, kMinP, kSeeds, kNeeds, kOffsets
};

class StepRows {
 public:
  // `inputs` s32[fields, rows]; what rows are fed is `fed_from` the call's argument of this number on: the token that each slot
  // sampled last, s32[slots], or of History ids s32[slots, width] and num_new s32[slots]. Only rows with this need are changed.
  StepRows(const Call& call, const Buffer& inputs, int fed_from)
      : rows_(inputs.dim(1)), need_(call.attr<int64_t>("need")), inputs_(inputs.ints()), fed_(call.arg(fed_from).ints()),
        dump_(call.arg(fed_from).dim(0) - 1) {
    if (call.arg(fed_from).rank() == 1) return;
    width_ = call.arg(fed_from).dim(1);
    num_new_ = call.arg(fed_from + 1).ints();
  }

  int64_t count() const { return rows_; }
  int64_t slot(int64_t row) const { return field(kSlots, row); }
  int64_t position(int64_t row) const { return field(kPositions, row); }
  bool changes(int64_t row) const { return field(kSamples, row) > 0 && field(kNeeds, row) & need_ && slot(row) != dump_; }

  // Whether the slot's state gets the row's new tokens: those of a row with drafts before it may be wrong.
  bool owns(int64_t row) const { return num_new_ == nullptr || field(kOffsets, row) == 0; }

  // The tokens that the slot's state lacks, the newest first.
  int64_t num_new(int64_t row) const {
    if (!field(kDecodes, row)) return 0;
    return num_new_ ? num_new_[slot(row)] + field(kOffsets, row) : 1;
  }
  int64_t new_token(int64_t row, int64_t back) const {
    return fed_[slot(row) * width_ + (num_new_ ? std::max<int64_t>(position(row) - 1 - back, 0) : 0)];
  }

 private:
  int32_t field(Field number, int64_t row) const { return inputs_[number * rows_ + row]; }

  int64_t rows_, need_;
  const int32_t *inputs_, *fed_, *num_new_ = nullptr;
  int64_t dump_, width_ = 1;
};

// Calls change(row, begin, size) for pieces of all rows of f32[rows, vocab] logits.
template <typename Change>
void by_piece(const Buffer& logits, const Change& change) {
  const int64_t vocab = logits.dim(1), pieces = (vocab + kPiece - 1) / kPiece;
  parallel_for(logits.dim(0) * pieces, [&](int64_t task) {
    const int64_t begin = task % pieces * kPiece;
    change(task / pieces, begin, std::min(kPiece, vocab - begin));
  });
}

}  // namespace odriver
