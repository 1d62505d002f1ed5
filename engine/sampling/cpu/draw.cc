// Tokens drawn from logits on a CPU: what engine/sampling/sampler.py has of XLA's operations, as one call. XLA compiles those
// for seconds, for each number of rows; and a row here costs nothing where it is greedy.
//
// Each row depends on its own logits and parameters alone. Random numbers are those of jax.random, bit for bit.

#include <cfloat>
#include <cmath>
#include <vector>

#include "handler.h"
#include "logit_bias.h"
#include "logprobs.h"
#include "penalties.h"
#include "rows.h"
#include "slot_writer.h"
#include "team.h"
#include "token_masks.h"

namespace odriver {

constexpr int64_t kLikely = 64;  // blocks in which top-p's cut is searched for first
constexpr int kBucketShift = 18;  // 32 buckets for each power of two

struct Parameters {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

// A relative logit that no fewer than `count` tokens reach.
float reached_by(const Row& row, int64_t count) { return (row.held_by(count) - row.best) / row.temperature; }

// The relative logits that are not below `lowest`.
std::vector<float> from(const Row& row, float lowest) {
  std::vector<float> found;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if ((row.maxima[block] - row.best) / row.temperature < lowest) continue;
    float of_block[kBlock];
    row.below(block, of_block);
    for (float x : of_block)
      if (x >= lowest) found.push_back(x);
  }
  return found;
}

float kth(const Row& row, int64_t k) {
  std::vector<float> some = from(row, reached_by(row, k));
  std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<float>());
  return some[k - 1];
}

// Of some tokens, the last one needed when weights are added up, the likeliest first, until they are `enough`.
float last_needed(std::vector<float> some, double& sum, double enough) {
  std::sort(some.begin(), some.end(), std::greater<float>());
  float last = INFINITY;
  for (float x : some) {
    if (sum >= enough) break;
    last = x, sum += std::exp(x);
  }
  return last;
}

// The last token needed for a share of the weights of those that are not below `lowest`.
float crossing(const Row& row, float share, float lowest) {
  double total = 0, sum = 0;
  float weights[kBlock];
  for (int64_t block = 0; block < row.blocks(); ++block) total += row.weights(block, lowest, weights);
  const double enough = share * total;
  const float likely = std::max(lowest, reached_by(row, std::min(kLikely, row.blocks())));
  const float last = last_needed(from(row, likely), sum, enough);
  if (sum >= enough || likely == lowest) return last;

  // It is among many: of all buckets, only the one with the sum is put in order.
  const auto bucket_of = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return int64_t((bits & 0x7fffffff) >> kBucketShift);  // the further below 0, the higher
  };
  std::vector<float> some = from(row, std::max(lowest, std::nextafter(kWeightless, 0.0f)));
  std::vector<double> sums(bucket_of(kWeightless) + 1);
  for (float x : some) sums[bucket_of(x)] += std::exp(x);
  int64_t bucket = 0;
  for (sum = 0; bucket + 1 < int64_t(sums.size()) && sum + sums[bucket] < enough; ++bucket) sum += sums[bucket];
  some.erase(std::remove_if(some.begin(), some.end(), [&](float x) { return bucket_of(x) != bucket; }), some.end());
  return some.empty() ? lowest : last_needed(some, sum, enough);
}

// The lowest relative logit that top-k, top-p and min-p keep; ties with it are kept.
float lowest_kept(const Row& row, const Parameters& parameters) {
  float cut = -INFINITY;
  if (parameters.top_k > 0 && parameters.top_k < row.size) cut = kth(row, parameters.top_k);
  if (parameters.top_p < 1) cut = crossing(row, parameters.top_p, cut);
  return std::min(std::max(cut, std::log(parameters.min_p)), 0.0f);  // the best token is kept
}

// The first index with a weight at which the sum passes this share of all; the last one where rounding lets none.
int64_t choose(const float* weights, int64_t count, float share) {
  double total = 0, passed = 0;
  for (int64_t at = 0; at < count; ++at) total += weights[at];
  int64_t last = 0;
  for (int64_t at = 0; at < count; ++at) {
    if (!(weights[at] > 0)) continue;
    passed += weights[at], last = at;
    if (passed > share * total) break;
  }
  return last;
}

struct Key {
  uint32_t first, second;
};

// Threefry-2x32 with 20 rounds (Salmon et al. 2011).
Key hash(Key key, uint32_t first, uint32_t second) {
  const uint32_t keys[] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDAu};
  const int turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  uint32_t x = first + keys[0], y = second + keys[1];
  for (uint32_t round = 0; round < 5; ++round) {
    for (int turn : turns[round % 2]) {
      x += y;
      y = (y << turn | y >> (32 - turn)) ^ x;
    }
    x += keys[(round + 1) % 3];
    y += keys[(round + 2) % 3] + round + 1;
  }
  return {x, y};
}

// jax.random.uniform(key, (n,))[index]
float uniform(Key key, uint32_t index) {
  const Key bits = hash(key, 0, index);
  const uint32_t number = (bits.first ^ bits.second) >> 9 | 0x3F800000u;
  float from_one;
  std::memcpy(&from_one, &number, sizeof from_one);
  return from_one - 1;
}

int32_t draw(const Row& row, const Parameters& parameters, Key key) {
  static thread_local std::vector<float> sums;
  const float lowest = lowest_kept(row, parameters);
  float weights[kBlock];
  sums.resize(row.blocks());
  for (int64_t block = 0; block < row.blocks(); ++block) sums[block] = row.weights(block, lowest, weights);
  const int64_t block = choose(sums.data(), sums.size(), uniform(key, 0));
  row.weights(block, lowest, weights);
  return block * kBlock + choose(weights, kBlock, uniform(key, 1));
}

// A token of each row that samples, kNoToken of others. `inputs` s32[fields, rows] as in step_rows.h.
void draw_rows(const Buffer& logits, const Buffer& inputs, const Buffer& keys, int32_t* tokens) {
  const int64_t rows = logits.dim(0), size = logits.dim(1);
  const Key key{static_cast<const uint32_t*>(keys.data())[0], static_cast<const uint32_t*>(keys.data())[1]};
  const auto field = [&](Field which, int64_t row) { return inputs.ints()[which * rows + row]; };
  const auto number = [&](Field which, int64_t row) { return inputs.floats()[which * rows + row]; };
  parallel_for(rows, [&](int64_t at) {
    tokens[at] = kNoToken;
    if (field(kSamples, at) <= 0) return;
    const Parameters parameters{number(kTemperature, at), field(kTopK, at), number(kTopP, at), number(kMinP, at)};
    static thread_local std::vector<float> maxima;
    Row row{logits.floats() + at * size, size, 0, parameters.temperature, maxima};
    tokens[at] = find_best(row);
    if (tokens[at] == kNoToken || parameters.temperature < FLT_MIN) return;  // that is greedy
    const Key of_seed = hash(key, 0, field(kSeeds, at));
    tokens[at] = draw(row, parameters, hash(of_seed, 0, field(kPositions, at)));
  });
}

// (logits f32[rows, vocab], inputs s32[fields, rows], key u32[2]) -> tokens s32[rows]
const char* sample(const Call& call) {
  draw_rows(call.arg(0), call.arg(1), call.arg(2), static_cast<int32_t*>(call.result(0).data()));
  return nullptr;
}

// (logits f32[rows, vocab], inputs s32[fields, rows], the token that each slot sampled last s32[slots], key u32[2]) ->
// (tokens s32[rows], the same last tokens with these)
const char* draw_step(const Call& call) {
  const Buffer inputs = call.arg(1);
  int32_t *tokens = static_cast<int32_t*>(call.result(0).data()), *last = static_cast<int32_t*>(call.result(1).data());
  if (last != call.arg(2).data()) return "XLA has copied the last tokens";
  draw_rows(call.arg(0), inputs, call.arg(3), tokens);
  const int64_t rows = inputs.dim(1);
  const int32_t *slots = inputs.ints() + kSlots * rows, *samples = inputs.ints() + kSamples * rows;
  for (int64_t row = 0; row < rows; ++row)
    if (samples[row] > 0) last[slots[row]] = std::max(tokens[row], 0);
  return nullptr;
}

}  // namespace odriver

ODRIVER_HANDLER(odriver_sample, odriver::sample)
ODRIVER_HANDLER(odriver_draw, odriver::draw_step)
ODRIVER_HANDLER(odriver_logprobs, odriver::logprobs)
ODRIVER_HANDLER(odriver_bias, odriver::bias)
ODRIVER_HANDLER(odriver_penalties, odriver::penalties)
ODRIVER_HANDLER(odriver_mask, odriver::mask)
ODRIVER_HANDLER(odriver_write_slot, odriver::write_slot)
