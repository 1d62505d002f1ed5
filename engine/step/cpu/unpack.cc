// What a step is told as one array, taken apart: what StepLayout.unpack (engine/step/layout.py) has of XLA's operations, where
// rows have no drafts. Its thirty small loops take XLA longer to compile than all layers of a model.

#include <algorithm>
#include <cstring>
#include <vector>

#include "handler.h"

namespace odriver {

constexpr int32_t kFromSlot = -1;  // instead of a token: the one that the row's slot sampled last
constexpr int64_t kSlot = 0, kStart = 1, kFirstParameter = 2;  // columns of an admission

int32_t* written(const Call& call, int result) { return static_cast<int32_t*>(call.result(result).data()); }

// The arrays by slot, which the call writes where they are.
struct Slots {
  int32_t *num_tokens, *page_tables, *parameters;
  int64_t count, pages_per_seq, num_parameters;

  // `writes`: admissions, then the places of page table entries, then their pages.
  void change(const int32_t* writes, int64_t admissions, int64_t entries) const {
    const int64_t columns = kFirstParameter + num_parameters;
    const int32_t *places = writes + admissions * columns, *pages = places + entries;
    for (const int32_t* row = writes; row != places; row += columns) {
      num_tokens[row[kSlot]] = row[kStart];
      for (int64_t at = 0; at < num_parameters; ++at) parameters[at * count + row[kSlot]] = row[kFirstParameter + at];
    }
    for (int64_t at = 0; at < entries; ++at) page_tables[places[at]] = pages[at];
  }
};

// The sampler's rows, of which the first ones are the model's too.
struct StepRows {
  const int32_t *slots, *counts, *samples;
  int64_t count, of_model;
};

// token_ids s32[T] and positions s32[T]; lens s32[rows], and begins s32[of_model + 1] of the tokens.
void write_tokens(const StepRows& rows, const int32_t* given, const int32_t* last_token, const int32_t* lens,
                  const int32_t* begins, int64_t tokens, int32_t* token_ids, int32_t* positions) {
  std::copy_n(given, tokens, token_ids);
  std::fill_n(positions, tokens, 0);
  for (int64_t row = 0; row < rows.of_model; ++row) {
    if (given[row] == kFromSlot) token_ids[row] = last_token[rows.slots[row]];
    const int64_t end = std::min<int64_t>(begins[row + 1], tokens);
    for (int64_t token = begins[row]; token < end; ++token) positions[token] = lens[row] - begins[row + 1] + token;
  }
}

// inputs s32[4 + parameters, rows], as pack_inputs in engine/sampling/sampler_inputs.py makes them.
void write_inputs(const StepRows& rows, const Slots& slots, const int32_t* given, const int32_t* lens, int32_t* inputs) {
  std::copy_n(rows.slots, rows.count, inputs);
  std::copy_n(rows.samples, rows.count, inputs + rows.count);
  for (int64_t row = 0; row < rows.count; ++row)
    inputs[2 * rows.count + row] = row < rows.of_model && given[row] == kFromSlot;
  std::copy_n(lens, rows.count, inputs + 3 * rows.count);
  for (int64_t at = 0; at < slots.num_parameters; ++at)
    for (int64_t row = 0; row < rows.count; ++row)
      inputs[(4 + at) * rows.count + row] = slots.parameters[at * slots.count + rows.slots[row]];
}

// (packed, num_tokens[slots], page_tables[groups * slots, pages], parameters[n, slots], last_token[slots]) -> (the three arrays
// by slot; token_ids[T], positions[T], sampled[model rows], num_logits[]; kv_lens[model rows], page_indices[groups, model rows,
// pages], cu_q_lens[model rows + 1], num_seqs[1]; inputs[4 + n, rows]), all s32
const char* unpack(const Call& call) {
  for (int state = 0; state < 3; ++state)
    if (call.result(state).data() != call.arg(1 + state).data()) return "XLA has copied the state of slots";
  const Buffer tables = call.arg(2), parameters = call.arg(3), page_indices = call.result(8);
  const Slots slots{written(call, 0), written(call, 1),        written(call, 2),
                    parameters.dim(1), tables.dim(1), parameters.dim(0)};
  const int64_t count = call.result(11).dim(1), tokens = call.result(3).dim(0), of_model = page_indices.dim(1);
  const int32_t *packed = call.arg(0).ints(), *given = packed + call.arg(0).dim(0) - tokens;
  const StepRows rows{packed, packed + count, packed + 2 * count, count, of_model};
  slots.change(packed + 3 * count, call.attr<int64_t>("admissions"), call.attr<int64_t>("entries"));

  std::vector<int32_t> lens(count);
  for (int64_t row = 0; row < count; ++row) lens[row] = slots.num_tokens[rows.slots[row]] + rows.counts[row];
  for (int64_t row = 0; row < count; ++row) slots.num_tokens[rows.slots[row]] = lens[row];
  int32_t *sampled = written(call, 5), *num_logits = written(call, 6), *begins = written(call, 9);
  begins[0] = *num_logits = 0;
  for (int64_t row = 0; row < of_model; ++row) {
    begins[row + 1] = begins[row] + rows.counts[row];
    sampled[row] = std::max(begins[row + 1] - 1, 0);
    if (rows.samples[row]) *num_logits = row + 1;
  }
  std::copy_n(lens.data(), of_model, written(call, 7));
  *written(call, 10) = of_model - std::count(rows.counts, rows.counts + of_model, 0);
  int32_t* indices = written(call, 8);
  for (int64_t group = 0; group < page_indices.dim(0); ++group)
    for (int64_t row = 0; row < of_model; ++row, indices += slots.pages_per_seq)
      std::copy_n(slots.page_tables + (group * slots.count + rows.slots[row]) * slots.pages_per_seq, slots.pages_per_seq, indices);
  write_tokens(rows, given, call.arg(4).ints(), lens.data(), begins, tokens, written(call, 3), written(call, 4));
  write_inputs(rows, slots, given, lens.data(), written(call, 11));
  return nullptr;
}

}  // namespace odriver

ODRIVER_HANDLER(odriver_unpack, odriver::unpack)
