// Which of the tokens that a step sampled are the text, and the drafts behind it: what engine/speculation/verification.py and
// prompt_lookup.py have of XLA's operations, which pass over all places of all rows many times.

#include <algorithm>
#include <vector>

#include "handler.h"

namespace odriver {

constexpr int32_t kNoDraft = -1, kDraftedLater = -2, kNotText = -2;
constexpr int32_t kOfEarlier = 64;  // added to a number of drafts that are of earlier texts
constexpr int64_t kBlock = 64;  // places that are looked over at once

// A run of a sequence's last tokens that came before: where it ended, and of how many tokens it is.
struct Run {
  int64_t end = -1, length = 0;
};

// The last tokens of a sequence, the latest first, and how far they repeat themselves (Gusfield 1997, "Z algorithm").
class Pattern {
 public:
  Pattern(const int32_t* last, int64_t size) : last_(last), repeats_(size) {
    if (size) repeats_[0] = size;
    for (int64_t at = 1, begin = 0, end = 0; at < size; ++at) {
      int64_t run = at < end ? std::min(repeats_[at - begin], end - at) : 0;
      while (at + run < size && last_[-run] == last_[-at - run]) ++run;
      repeats_[at] = run;
      if (at + run > end) begin = at, end = at + run;
    }
  }

  int64_t size() const { return static_cast<int64_t>(repeats_.size()); }
  int32_t operator[](int64_t at) const { return last_[-at]; }
  // How many tokens from `at` on are as the first ones.
  int64_t repeats(int64_t at) const { return repeats_[at]; }

 private:
  const int32_t* last_;
  std::vector<int64_t> repeats_;
};

// Looks in a sequence's tokens, and in earlier texts, the last places of its row, for runs of its last tokens.
class Lookup {
 public:
  Lookup(const Call& call, int64_t width)
      : shortest_(call.attr<int64_t>("shortest")), longest_(call.attr<int64_t>("longest")),
        own_width_(width - call.attr<int64_t>("earlier_width")), width_(width) {}

  bool looks() const { return longest_ > 0; }

  // Writes the `count` drafts behind `length` tokens of a row, kNoDraft where there is none; how many there are, perhaps with
  // kOfEarlier.
  int32_t draft(const int32_t* ids, int64_t length, int64_t count, int32_t* drafts) const {
    std::fill_n(drafts, count, kNoDraft);
    if (length <= 0) return 0;
    const Pattern last(ids + length - 1, std::min(longest_, length));
    Run best = latest(ids, last, 0, length - 1, {});
    if (best.length < longest_) best = latest(ids, last, own_width_, width_ - 1, best);
    if (best.length < shortest_) return 0;
    const bool own = best.end < own_width_;
    const int64_t first = best.end + 1, period = own ? length - first : width_;
    int32_t found = 0;
    for (; found < count; ++found) {
      const int32_t token = ids[std::min(first + found % period, width_ - 1)];
      if (token < 0) break;
      drafts[found] = token;
    }
    return own ? found : found + kOfEarlier;
  }

 private:
  // The longest run that ends from `from` on and before `to`, of several the latest; `best`, unless it is longer.
  // No token is compared again that has been found to be as one of the last: so it takes as long whatever a client writes.
  static Run latest(const int32_t* ids, const Pattern& last, int64_t from, int64_t to, Run best) {
    int64_t known = to, since = to;  // tokens behind `known`, up to `since`, are as the last ones
    while (to > from && best.length < last.size()) {
      const int64_t begin = std::max(from, to - kBlock);
      int32_t any = 0;
      for (int64_t at = begin; at < to; ++at) any |= ids[at] == last[0];
      for (int64_t at = to - 1; any && at >= begin; --at) {
        if (ids[at] != last[0] || ids[at + 1] < 0) continue;
        int64_t run = at > known ? std::min(last.repeats(since - at), at - known) : 0;
        if (at - run <= known) {
          while (run < last.size() && at - run >= from && ids[at - run] == last[run]) ++run;
          known = at - run, since = at;
        }
        if (run > best.length) best = {at, run};
        if (run == last.size()) break;
      }
      to = begin;
    }
    return best;
  }

  int64_t shortest_, longest_, own_width_, width_;
};

// (sampled[rows], inputs[fields, rows] as pack_inputs has them in engine/sampling/sampler_inputs.py, ids[slots, width],
// num_new[slots], num_wrong[slots]) -> (result[2, rows], and the last three after the step), all s32. Where `longest` is 0,
// drafts are made later.
const char* verify(const Call& call) {
  for (int state = 0; state < 3; ++state)
    if (call.result(1 + state).data() != call.arg(2 + state).data()) return "XLA has copied the history";
  const int64_t rows = call.arg(0).dim(0), width = call.arg(2).dim(1), dump = call.arg(2).dim(0) - 1;
  const auto field = [&](int64_t number) { return call.arg(1).ints() + number * rows; };
  const int64_t of_drafts = call.attr<int64_t>("of_drafts");
  const int32_t *sampled = call.arg(0).ints(), *slots = field(0), *samples = field(1), *positions = field(3);
  const int32_t *offsets = field(of_drafts), *rests = field(of_drafts + 1);
  const bool looks_up = *field(of_drafts + 2) > 0;
  const int64_t num_drafts = call.attr<int64_t>("num_drafts");
  const Lookup lookup(call, width);
  auto written = [&](int result) { return static_cast<int32_t*>(call.result(result).data()); };
  int32_t *tokens = written(0), *counts = tokens + rows, *ids = written(1), *num_new = written(2), *num_wrong = written(3);

  std::fill_n(tokens, rows, kNotText);
  std::fill_n(counts, rows, 0);
  for (int64_t first = 0, end; first < rows; first = end) {
    end = first + 1;
    while (end < rows && offsets[end]) ++end;
    if (samples[first] <= 0 || slots[first] == dump) continue;
    int32_t* own = ids + slots[first] * width;
    int64_t row = first;
    for (bool right = true; row < end && right; ++row) {
      right = rests[row] > 0 && sampled[row] >= 0 && sampled[row] == own[positions[row]];
      own[positions[row]] = std::max(sampled[row], 0);
      tokens[row] = sampled[row];
    }
    num_new[slots[first]] = row - first;
    num_wrong[slots[first]] = end - row;
    const int64_t length = positions[row - 1] + 1;
    int32_t* drafts = own + length;
    if (lookup.looks()) {
      if (looks_up) counts[first] = lookup.draft(own, length, num_drafts, drafts);
      else std::fill_n(drafts, num_drafts, kNoDraft);
    } else {
      std::fill_n(drafts, num_drafts, kDraftedLater);
      counts[first] = num_drafts;
    }
  }
  return nullptr;
}

}  // namespace odriver

ODRIVER_HANDLER(odriver_verify, odriver::verify)
