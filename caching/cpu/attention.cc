// Ragged paged attention that reads the pages where they lie (caching/attention/cpu_attention.py says what the arguments are).
//
// A page of one head holds its keys as [head_dim, page_size] and its values as [page_size, head_dim]: both are then the
// right side of a plain product, scores = q @ keys and out = weights @ values. One task is one kv head of a few queries
// of one sequence; it walks the keys kBlock at a time with a running softmax (Milakov and Gimelshein 2018), always in
// the same blocks, so that a query's result depends neither on its neighbours nor on where its prompt was cut.

#include <array>
#include <vector>

#include "handler.h"
#include "team.h"
#include "tiles.h"

namespace odriver {

constexpr int64_t kBlock = 128;      // keys per update of the running softmax, or a page where that is longer
constexpr int64_t kTileQueries = 48;  // queries times heads of a group that share one reading of the keys
constexpr float kMasked = -1e30f;

struct Shape {
  int64_t tokens, heads, kv_heads, head_dim, page_size, pages_per_seq;
  int64_t group() const { return heads / kv_heads; }
  int64_t page_elements() const { return page_size * head_dim; }
};

struct Table {
  const int32_t *kv_lens, *page_indices, *cu_q_lens;
  int64_t num_seqs;
  int64_t position(int64_t row, int64_t token) const { return kv_lens[row] - cu_q_lens[row + 1] + token; }
};

// Some queries of one sequence, for one kv head.
struct Task {
  int64_t row, kv_head, first, past;
};

// Rotary position embedding in the half-split form: of the first 2 * pairs elements, d turns with d + pairs.
struct Rotation {
  const float *cos, *sin;
  int64_t pairs;
  template <typename Put>
  void turn(const float* x, int64_t token, int64_t head_dim, const Put& put) const {
    const float *c = cos + token * pairs, *s = sin + token * pairs;
    for (int64_t d = 0; d < pairs; ++d) {
      put(d, x[d] * c[d] - x[pairs + d] * s[d]);
      put(pairs + d, x[pairs + d] * c[d] + x[d] * s[d]);
    }
    for (int64_t d = 2 * pairs; d < head_dim; ++d) put(d, x[d]);
  }
};

// Queries, keys or values of a step: where those of a token and a kv head are.
struct Heads {
  const float* begin;
  int64_t of_token, of_kv_head;

  const float* at(int64_t token, int64_t kv_head) const { return begin + token * of_token + kv_head * of_kv_head; }
};

// The arrays of a step; k and v begin with null if the pages have them already.
struct Step {
  Heads q, k, v;
  Rotation rotation;
  const float* sinks;  // [heads], or null
  float* out;
  float scale;
  int64_t window;   // 0 is none
  int64_t chunk;    // 0 is none
  int64_t first;    // keys before it are seen by their own queries alone
  float soft_cap;   // 0 is none

  // The first key that a query at `position` sees.
  int64_t first_seen(int64_t position) const {
    const int64_t begin = std::min(position, first);
    if (chunk) return std::max(begin, position / chunk * chunk);
    return window ? std::max(begin, position + 1 - window) : begin;
  }
};

template <typename Stored>
Stored* page_of(Stored* pages, const Shape& shape, const Table& table, int64_t row, int64_t kv_head, int64_t number) {
  const int64_t page = table.page_indices[row * shape.pages_per_seq + number];
  return pages + (page * shape.kv_heads + kv_head) * 2 * shape.page_elements();
}

template <typename Stored>
void write(Stored* pages, const Step& step, const Shape& shape, const Table& table, int64_t row, int64_t token) {
  const int64_t position = table.position(row, token), offset = position % shape.page_size;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    Stored* keys = page_of(pages, shape, table, row, head, position / shape.page_size);
    Stored* values = keys + shape.page_elements();
    const float* value = step.v.at(token, head);
    step.rotation.turn(step.k.at(token, head), token, shape.head_dim,
                       [&](int64_t d, float x) { store(keys + d * shape.page_size + offset, x); });
    for (int64_t d = 0; d < shape.head_dim; ++d) store(values + offset * shape.head_dim + d, value[d]);
  }
}

// The working memory of one thread, kept from call to call.
struct Scratch {
  std::vector<float> q, scores, out, high, total;
  // A sink is a key without a value that has been seen before all others: of a query's head, f[group], or null.
  void fit(int64_t queries, int64_t block, int64_t head_dim, int64_t group, const float* sinks) {
    q.resize(queries * head_dim);
    out.assign(queries * head_dim, 0.0f);
    scores.resize(queries * block);
    high.assign(queries, kMasked);
    total.assign(queries, sinks ? 1.0f : 0.0f);
    if (sinks)
      for (int64_t query = 0; query < queries; ++query) high[query] = sinks[query % group];
  }
};

// Turns the scores of one query into weights, its sums made relative to the new highest score.
inline void soften(float* scores, int64_t count, float* out, int64_t head_dim, float& high, float& total) {
  Vector above = load(scores);
  for (int64_t c = kWidth; c < count; c += kWidth) {
    const Vector other = load(scores + c);
    above = above > other ? above : other;
  }
  const float higher = std::max(high, highest(above));
  Vector sums{};
  for (int64_t c = 0; c < count; c += kWidth) {
    const Vector weights = exponential(load(scores + c) - higher);
    store(scores + c, weights);
    sums += weights;
  }
  if (higher > high) {
    const float shrink = exponential(spread(high - higher))[0];
    total *= shrink;
    for (int64_t d = 0; d < head_dim; d += kWidth) store(out + d, load(out + d) * shrink);
    high = higher;
  }
  total += sum(sums);
}

// Brings scores smoothly to between -cap and cap.
inline void cap_scores(float* scores, int64_t count, float cap) {
  const float inverse = 1.0f / cap;
  for (int64_t c = 0; c < count; c += kWidth) store(scores + c, hyperbolic_tangent(load(scores + c) * inverse) * cap);
}

// Hides from a query at `position` the keys after it, and those before the first that it sees.
inline void mask(float* scores, int64_t first_key, int64_t count, int64_t position, int64_t first_seen) {
  for (int64_t c = std::max<int64_t>(0, position + 1 - first_key); c < count; ++c) scores[c] = kMasked;
  const int64_t gone = std::min(count, first_seen - first_key);
  for (int64_t c = 0; c < gone; ++c) scores[c] = kMasked;
}

// The keys and values of one head of one sequence, a vector of them at a time.
template <typename Stored>
struct Context {
  const Stored* pages;
  const Shape& shape;
  const Table& table;
  int64_t row, kv_head, length;

  const Stored* page(int64_t key) const {
    return page_of(pages, shape, table, row, kv_head, std::min(key, length - 1) / shape.page_size);
  }
  const Stored* keys(int64_t key) const { return page(key) + key % shape.page_size; }
  const Stored* values(int64_t key) const { return page(key) + shape.page_elements(); }
};

// scores[queries, keys from `key` on] = q @ keys, `vectors` of them at a time from column `c` on; returns where it stops.
template <int vectors, typename Stored>
int64_t score(const Context<Stored>& context, int64_t queries, const float* q, int64_t key, int64_t c, int64_t count,
              float* scores, int64_t block) {
  for (; c + vectors * kWidth <= count; c += vectors * kWidth) {
    Columns<vectors, Stored> columns{{}, {}, context.shape.page_size};
    for (int v = 0; v < vectors; ++v) {
      columns.begin[v] = context.keys(key + c + v * kWidth);
      columns.ahead[v] = context.keys(key + c + (vectors + v) * kWidth);
    }
    product(queries, q, context.shape.head_dim, columns, context.shape.head_dim, scores + c, block, false);
  }
  return c;
}

// out[queries, head_dim] += weights @ values of `depth` keys of one page, from column `d` on; returns where it stops.
template <int vectors, typename Stored>
int64_t mix(const Context<Stored>& context, int64_t queries, const float* weights, int64_t key, int64_t depth, int64_t d,
            float* out, int64_t block) {
  const int64_t head_dim = context.shape.head_dim;
  for (; d + vectors * kWidth <= head_dim; d += vectors * kWidth) {
    Columns<vectors, Stored> columns{{}, {}, head_dim};
    for (int v = 0; v < vectors; ++v) {
      columns.begin[v] = context.values(key) + d + v * kWidth;
      columns.ahead[v] = context.values(key + context.shape.page_size) + d + v * kWidth;
    }
    product(queries, weights, block, columns, depth, out + d, head_dim, true);
  }
  return d;
}

template <typename Stored>
void attend(const Stored* pages, const Step& step, const Shape& shape, const Table& table, const Task& task) {
  static thread_local Scratch scratch;
  const int64_t group = shape.group(), head_dim = shape.head_dim, page_size = shape.page_size;
  const int64_t queries = (task.past - task.first) * group;
  const int64_t block = std::max(kBlock / page_size, int64_t{1}) * page_size;
  scratch.fit(queries, block, head_dim, group, step.sinks ? step.sinks + task.kv_head * group : nullptr);
  float *scaled = scratch.q.data(), *scores = scratch.scores.data(), *sums = scratch.out.data();
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t token = task.first + query / group;
    step.rotation.turn(step.q.at(token, task.kv_head) + query % group * head_dim, token, head_dim,
                       [&](int64_t d, float x) { scaled[query * head_dim + d] = x * step.scale; });
  }

  const int64_t first_position = table.position(task.row, task.first);
  const int64_t length = table.position(task.row, task.past - 1) + 1;
  const Context<Stored> context{pages, shape, table, task.row, task.kv_head, length};
  // Pages before what the first query sees are another's: their scores are masked unread.
  const int64_t seen = step.first_seen(first_position) / page_size * page_size;
  for (int64_t key = seen / block * block; key < length; key += block) {
    const int64_t keys = std::min(block, length - key), unseen = std::max<int64_t>(0, seen - key);
    const int64_t count = (keys + kWidth - 1) / kWidth * kWidth;
    int64_t c = unseen;
    if (queries <= kWideRows) c = score<4>(context, queries, scaled, key, c, count, scores, block);
    c = score<2>(context, queries, scaled, key, c, count, scores, block);
    score<1>(context, queries, scaled, key, c, count, scores, block);
    for (int64_t query = 0; query < queries; ++query) {
      if (step.soft_cap > 0) cap_scores(scores + query * block, count, step.soft_cap);
      const int64_t position = first_position + query / group;
      mask(scores + query * block, key, count, position, step.first_seen(position));
      soften(scores + query * block, count, sums + query * head_dim, head_dim, scratch.high[query], scratch.total[query]);
    }
    for (c = unseen; c < keys; c += page_size) {  // no further than the last key: what lies behind is nobody's
      const int64_t depth = std::min(page_size, keys - c);
      int64_t d = 0;
      if (queries <= kWideRows) d = mix<4>(context, queries, scores + c, key + c, depth, d, sums, block);
      d = mix<2>(context, queries, scores + c, key + c, depth, d, sums, block);
      mix<1>(context, queries, scores + c, key + c, depth, d, sums, block);
    }
  }
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t token = task.first + query / group, head = task.kv_head * group + query % group;
    float* to = step.out + (token * shape.heads + head) * head_dim;
    const float* from = sums + query * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) to[d] = from[d] / scratch.total[query];
  }
}

// Queries late in a prompt first: they take longest.
std::vector<Task> tasks_of(const Shape& shape, const Table& table) {
  std::vector<Task> tasks;
  const int64_t queries = std::max(kTileQueries / shape.group(), int64_t{1});
  for (int64_t row = table.num_seqs - 1; row >= 0; --row) {
    const int64_t begin = table.cu_q_lens[row], end = table.cu_q_lens[row + 1];
    for (int64_t tile = (end - begin + queries - 1) / queries - 1; tile >= 0; --tile)
      for (int64_t head = 0; head < shape.kv_heads; ++head)
        tasks.push_back({row, head, begin + tile * queries, std::min(begin + (tile + 1) * queries, end)});
  }
  return tasks;
}

template <typename Stored>
void run(Stored* pages, const Step& step, const Shape& shape, const Table& table) {
  // Padding writes nothing, and is handed on as zeros.
  const int64_t used = table.cu_q_lens[table.num_seqs], token_elements = shape.heads * shape.head_dim;
  std::fill(step.out + used * token_elements, step.out + shape.tokens * token_elements, 0.0f);
  if (step.k.begin)
    parallel_for(table.num_seqs, [&](int64_t row) {
      for (int64_t token = table.cu_q_lens[row]; token < table.cu_q_lens[row + 1]; ++token)
        write(pages, step, shape, table, row, token);
    });
  const std::vector<Task> tasks = tasks_of(shape, table);
  parallel_for(static_cast<int64_t>(tasks.size()),
               [&](int64_t task) { attend<Stored>(pages, step, shape, table, tasks[task]); });
}

// Queries, keys and values of a step, each by itself or all in the array of the first.
std::array<Heads, 3> heads_of(const Shape& shape, const Buffer& q, const Buffer& k, const Buffer& v) {
  const int64_t head_dim = shape.head_dim, group = shape.group() * head_dim;
  if (q.rank() == 4) {
    const int64_t of_kv_head = group + 2 * head_dim, of_token = shape.kv_heads * of_kv_head;
    const auto from = [&](int64_t first) { return Heads{q.floats() + first, of_token, of_kv_head}; };
    return {from(0), from(group), from(group + head_dim)};
  }
  const auto alone = [&](const Buffer& x) { return Heads{x.size() ? x.floats() : nullptr, shape.kv_heads * head_dim, head_dim}; };
  return {Heads{q.floats(), shape.heads * head_dim, group}, alone(k), alone(v)};
}

// (pages, q[tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] or empty, cos, sin, sinks, kv_lens, page_indices,
// cu_q_lens, num_seqs) -> (the same pages, out like q). In the place of q may be [tokens, kv_heads, group + 2, head_dim] with k
// and v, which are empty then.
const char* attention(const Call& call) {
  const Buffer pool = call.arg(0), q = call.arg(1), sinks = call.arg(6), page_indices = call.arg(8), out = call.result(1);
  void* pages = call.result(0).data();
  if (pages != pool.data()) return "XLA has copied the pages";
  const Shape shape{out.dim(0), out.dim(1), pool.dim(1), pool.dim(4), pool.dim(3), page_indices.dim(1)};
  const Table table{call.arg(7).ints(), page_indices.ints(), call.arg(9).ints(), call.arg(10).ints()[0]};
  const auto [queries, keys, values] = heads_of(shape, q, call.arg(2), call.arg(3));
  const Step step{queries,
                  keys,
                  values,
                  {call.arg(4).floats(), call.arg(5).floats(), call.arg(4).dim(2)},
                  sinks.size() ? sinks.floats() : nullptr,
                  out.floats(),
                  call.attr<float>("scale"),
                  call.attr<int64_t>("window"),
                  call.attr<int64_t>("chunk"),
                  call.attr<int64_t>("first"),
                  call.attr<float>("soft_cap")};
  if (pool.dtype() == XLA_FFI_DataType_F32)
    run(static_cast<float*>(pages), step, shape, table);
  else
    run(static_cast<uint16_t*>(pages), step, shape, table);
  return nullptr;
}

// Memory that nobody has touched: the system gives it, zeroed, as it is written. What a page holds behind a sequence's
// last token is never read.
const char* untouched(const Call&) { return nullptr; }

}  // namespace odriver

ODRIVER_HANDLER(odriver_attention, odriver::attention)
ODRIVER_HANDLER(odriver_untouched, odriver::untouched)

extern "C" int odriver_vector_width() { return odriver::kWidth; }
