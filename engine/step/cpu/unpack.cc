// What a step is told as one array, taken apart: what StepLayout.unpack (engine/step/inputs/layout.py) has of XLA's
// operations. Its thirty small loops take XLA longer to compile than all layers of a model.

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

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

// A step's rows, as it is told of them.
struct Told {
  const int32_t *slots, *counts, *samples, *writes, *token_ids;

  Told(const int32_t* packed, int64_t size, int64_t rows, int64_t tokens)
      : slots(packed), counts(packed + rows), samples(packed + 2 * rows), writes(packed + 3 * rows),
        token_ids(packed + size - tokens) {}
};

// The results, but for the arrays by slot.
struct Results {
  int32_t *token_ids, *positions, *sampled, *num_logits, *lens, *page_indices, *begins, *num_seqs, *inputs;
  int64_t tokens, groups, of_model, rows;  // the model has the first ones of the sampler's rows

  explicit Results(const Call& call)
      : token_ids(written(call, 3)), positions(written(call, 4)), sampled(written(call, 5)), num_logits(written(call, 6)),
        lens(written(call, 7)), page_indices(written(call, 8)), begins(written(call, 9)), num_seqs(written(call, 10)),
        inputs(written(call, 11)), tokens(call.result(3).dim(0)), groups(call.result(8).dim(0)),
        of_model(call.result(8).dim(1)), rows(call.result(11).dim(1)) {}

  // Where rows begin, how long their sequences are, and their tables. `wrong`: by slot, what decoding rows go back by.
  void write_rows(const Told& told, const Slots& slots, const int32_t* wrong) const {
    begins[0] = 0;
    for (int64_t row = 0; row < of_model; ++row) {
      begins[row + 1] = begins[row] + told.counts[row];
      lens[row] = slots.num_tokens[told.slots[row]] + told.counts[row];
      if (wrong && decodes(told, row)) lens[row] -= wrong[told.slots[row]];
    }
    *num_seqs = of_model - std::count(told.counts, told.counts + of_model, 0);
    int32_t* indices = page_indices;
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t row = 0; row < of_model; ++row, indices += slots.pages_per_seq)
        std::copy_n(slots.page_tables + (group * slots.count + told.slots[row]) * slots.pages_per_seq, slots.pages_per_seq,
                    indices);
  }

  bool decodes(const Told& told, int64_t row) const {
    return told.counts[row] > 0 && told.token_ids[std::min<int64_t>(begins[row], tokens - 1)] == kFromSlot;
  }

  // `of_slot(slot, position)` is the token that a decoding row has there.
  template <typename OfSlot>
  void write_tokens(const Told& told, const OfSlot& of_slot) const {
    std::copy_n(told.token_ids, tokens, token_ids);
    std::fill_n(positions, tokens, 0);
    for (int64_t row = 0; row < of_model; ++row) {
      const int64_t end = std::min<int64_t>(begins[row + 1], tokens);
      for (int64_t token = begins[row]; token < end; ++token) {
        positions[token] = lens[row] - begins[row + 1] + token;
        if (token_ids[token] == kFromSlot) token_ids[token] = of_slot(told.slots[row], positions[token]);
      }
    }
  }

  // Of a row of the sampler, as pack_inputs in engine/sampling/sampler_inputs.py has them.
  void write_inputs(const Slots& slots, int64_t row, std::initializer_list<int32_t> first) const {
    int32_t* column = inputs + row;
    const int32_t slot = *first.begin();
    for (int32_t each : first) *column = each, column += rows;
    for (int64_t at = 0; at < slots.num_parameters; ++at, column += rows) *column = slots.parameters[at * slots.count + slot];
  }
};

// Rows have no drafts: a decoding row has one token, whose index is the row's.
void write_last(const Told& told, const Slots& slots, const Results& to, const int32_t* last_token) {
  to.write_rows(told, slots, nullptr);
  to.write_tokens(told, [&](int32_t slot, int32_t) { return last_token[slot]; });
  *to.num_logits = 0;
  for (int64_t row = 0; row < to.rows; ++row) {
    const int32_t slot = told.slots[row], length = slots.num_tokens[slot] + told.counts[row];
    to.write_inputs(slots, row, {slot, told.samples[row], row < to.of_model && told.token_ids[row] == kFromSlot, length});
    if (row >= to.of_model) continue;
    to.sampled[row] = std::max(to.begins[row + 1] - 1, 0);
    if (told.samples[row]) *to.num_logits = row + 1;
  }
}

// The history of all slots: ids[slots, width], and by slot the drafts of the last step that were not right.
struct History {
  const int32_t *ids, *wrong;
  int64_t width;
};

// A decoding row has a token and its drafts, and as many rows of the sampler.
void write_drafted(const Told& told, const Slots& slots, const Results& to, const History& history) {
  to.write_rows(told, slots, history.wrong);
  to.write_tokens(told, [&](int32_t slot, int32_t at) { return std::max(history.ids[slot * history.width + at], 0); });
  const int32_t looks_up = told.token_ids[-1];
  const int64_t behind = 4 + slots.num_parameters;  // where the fields of drafts begin
  std::fill_n(to.inputs + behind * to.rows, 3 * to.rows, 0);
  std::fill_n(to.inputs + (behind + 2) * to.rows, to.of_model, looks_up);
  std::fill_n(to.sampled, to.of_model, 0);
  int64_t at = 0;
  *to.num_logits = 0;
  for (int64_t row = 0; row < to.of_model; ++row) {
    const int32_t count = std::abs(told.samples[row]);
    *to.num_logits += count;
    for (int32_t rest = count; rest-- > 0 && at < to.of_model; ++at) {
      to.write_inputs(slots, at, {told.slots[row], told.samples[row] > 0, to.decodes(told, row), to.lens[row] - rest});
      to.inputs[behind * to.rows + at] = count - 1 - rest;
      to.inputs[(behind + 1) * to.rows + at] = rest;
      to.sampled[at] = to.begins[row + 1] - 1 - rest;
    }
  }
  for (; at < to.rows; ++at) to.write_inputs(slots, at, {int32_t(slots.count - 1), 0, 0, 0});
}

// (packed, num_tokens[slots], page_tables[groups * slots, pages], parameters[n, slots], last_token[slots]; or instead of the
// last one ids[slots, width] and num_wrong[slots] of the history) -> (the three arrays by slot; token_ids[T], positions[T],
// sampled[model rows], num_logits[]; kv_lens[model rows], page_indices[groups, model rows, pages], cu_q_lens[model rows + 1],
// num_seqs[1]; inputs[fields, rows]), all s32
template <typename Write>
const char* unpack(const Call& call, const Write& write) {
  for (int state = 0; state < 3; ++state)
    if (call.result(state).data() != call.arg(1 + state).data()) return "XLA has copied the state of slots";
  const Buffer tables = call.arg(2), parameters = call.arg(3);
  const Slots slots{written(call, 0),  written(call, 1), written(call, 2),
                    parameters.dim(1), tables.dim(1),    parameters.dim(0)};
  const Results results(call);
  const Told told(call.arg(0).ints(), call.arg(0).dim(0), results.rows, results.tokens);
  slots.change(told.writes, call.attr<int64_t>("admissions"), call.attr<int64_t>("entries"));
  write(told, slots, results);
  for (int64_t row = 0; row < results.of_model; ++row) slots.num_tokens[told.slots[row]] = results.lens[row];
  return nullptr;
}

const char* unpack_last(const Call& call) {
  return unpack(call, [&](const Told& told, const Slots& slots, const Results& results) {
    write_last(told, slots, results, call.arg(4).ints());
  });
}

const char* unpack_drafts(const Call& call) {
  return unpack(call, [&](const Told& told, const Slots& slots, const Results& results) {
    write_drafted(told, slots, results, {call.arg(4).ints(), call.arg(5).ints(), call.arg(4).dim(1)});
  });
}

}  // namespace odriver

ODRIVER_HANDLER(odriver_unpack, odriver::unpack_last)
ODRIVER_HANDLER(odriver_unpack_drafts, odriver::unpack_drafts)
