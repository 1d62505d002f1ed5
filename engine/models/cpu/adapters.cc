// Adapters of rows: out[row] += (x[row] @ a) @ b, by the factors in each row's slot. Factors that no row has are not read, and
// a row's product does not depend on the others.
//
// A slot is written by engine/models/adapters/slot_words.py: a header, a of all of a kernel's parts side by side in panels, of
// which the last is half as wide where that suffices, and b of each part in panels. Its numbers are float32 or bfloat16. A part
// has the rank that this adapter has there, which may be 0.

#include <algorithm>
#include <memory>
#include <vector>

#include "handler.h"
#include "panels.h"
#include "team.h"

namespace odriver {

constexpr int64_t kHeader = 16;  // words: the bytes of a number, 0 without an adapter, and the rank of each part
constexpr int kRowsAtOnce = kMaxSums / kPanelVectors;
constexpr int64_t kTilesOfThread = 4;  // at least, or a tile is for several threads
constexpr int64_t kFetched = 64;       // rows of panels, ahead of the one that is multiplied

int64_t panels_of(int64_t columns) { return (columns + kPanelWidth - 1) / kPanelWidth; }
int64_t up_to_vector(int64_t columns) { return (columns + kWidth - 1) / kWidth * kWidth; }

// Where a kernel has the outputs of its parts: `run` of the first, of the next and so on, and again.
struct Outputs {
  const int32_t* runs;
  int64_t parts, width;

  int64_t before(int64_t part) const {
    int64_t sum = 0;
    for (int64_t each = 0; each < part; ++each) sum += runs[each];
    return sum;
  }
  int64_t count(int64_t part) const { return width / before(parts) * runs[part]; }
  int64_t place(int64_t part, int64_t output) const {
    return output / runs[part] * before(parts) + before(part) + output % runs[part];
  }
  // Whole panels from this one on whose outputs are one behind the other.
  int64_t panels_in_run(int64_t part, int64_t panel) const {
    return (runs[part] - panel * kPanelWidth % runs[part]) / kPanelWidth;
  }
};

// The factors of a slot. `depth` are the kernel's inputs.
struct Slot {
  const int32_t* words;
  int64_t depth;

  bool is_used() const { return words[0] != 0; }
  bool is_narrow() const { return words[0] == sizeof(uint16_t); }
  int64_t rank(int64_t part) const { return words[1 + part]; }
  int64_t before(int64_t part) const {
    int64_t sum = 0;
    for (int64_t each = 0; each < part; ++each) sum += rank(each);
    return sum;
  }

  template <typename Stored>
  const Stored* a(int64_t panel) const {
    return reinterpret_cast<const Stored*>(words + kHeader) + panel * depth * kPanelWidth;
  }
  template <typename Stored>
  const Stored* b(const Outputs& outputs, int64_t part, int64_t panel) const {
    const Stored* begin = a<Stored>(0) + up_to_vector(before(outputs.parts)) * depth;
    for (int64_t each = 0; each < part; ++each) begin += panels_of(outputs.count(each)) * rank(each) * kPanelWidth;
    return begin + panel * rank(part) * kPanelWidth;
  }
};

// out[rows, vectors * kWidth] (+)= x[rows, depth] @ panel[depth, the same], for so many panels, one behind the other from `column`
// of out; rows are wherever x and out point to. What is added to out has been added up before.
template <int rows, int vectors, typename Stored>
void multiply_panels(const float* const* x, const Stored* panel, int64_t depth, float* const* out, int64_t column, int64_t count,
                     bool add) {
  const float* from[rows];
  std::copy(x, x + rows, from);
  for (const int64_t end = column + count * vectors * kWidth; column < end; column += vectors * kWidth) {
    Vector sums[rows][vectors] = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; ++k, panel += vectors * kWidth) {
      Vector columns[vectors];
      for (int v = 0; v < vectors; ++v) columns[v] = load(panel + v * kWidth);
      for (size_t byte = 0; byte < vectors * kWidth * sizeof(Stored); byte += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const char*>(panel + kFetched * vectors * kWidth) + byte);
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < vectors; ++v) sums[row][v] = fma(columns[v], from[row][k], sums[row][v]);
    }
    for (int row = 0; row < rows; ++row)
      for (int v = 0; v < vectors; ++v) {
        float* to = out[row] + column + v * kWidth;
        store(to, add ? load(to) + sums[row][v] : sums[row][v]);
      }
  }
}

// multiply_panels for `count` rows.
template <int vectors, typename Stored, int rows = kRowsAtOnce>
auto multiply_panels_of(int64_t count) {
  if constexpr (rows > 1)
    if (count < rows) return multiply_panels_of<vectors, Stored, rows - 1>(count);
  return &multiply_panels<rows, vectors, Stored>;
}

// The rows x[rows, depth] of a step, the slot of each or -1, and their products out[rows, width] with the kernel.
struct SlottedRows {
  const float* x;
  float* out;
  const int32_t* slots;
  int64_t rows, depth;
};

class Adapters {
 public:
  Adapters(const SlottedRows& all, const Outputs& outputs, const int32_t* words, int64_t slots, int64_t words_of_slot)
      : all_(all), outputs_(outputs) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const Slot factors{words + slot * words_of_slot, all.depth};
      if (factors.is_used()) take(factors, slot);
    }
    low_.reset(new float[order_.size() * columns_]);
  }

  void add() const {
    const int64_t tiles = tiles_.size(), of_a = panels_of(columns_);
    int64_t of_b = 0;
    for (int64_t part = 0; part < outputs_.parts; ++part) of_b += panels_of(outputs_.count(part));
    if (tiles >= kTilesOfThread * team().size()) {  // a tile's factors are then read as one piece
      parallel_for(tiles, [&](int64_t tile) {
        for (int64_t panel = 0; panel < of_a; ++panel) multiply_a(tiles_[tile], panel);
        multiply_b(tiles_[tile], 0, of_b);
      });
      return;
    }
    if (tiles == 0) return;
    parallel_for(tiles * of_a, [&](int64_t task) { multiply_a(tiles_[task / of_a], task % of_a); });
    const int64_t pieces = (kTilesOfThread * team().size() + tiles - 1) / tiles;
    parallel_for(tiles * pieces, [&](int64_t task) {
      const int64_t piece = task % pieces;
      multiply_b(tiles_[task / pieces], of_b * piece / pieces, of_b * (piece + 1) / pieces);
    });
  }

 private:
  // Rows of one slot, as many as are multiplied at once.
  struct Tile {
    Slot slot;
    int64_t begin, count;
  };

  const SlottedRows all_;
  const Outputs outputs_;
  std::vector<int64_t> order_;    // the rows that have an adapter, by slot
  std::vector<Tile> tiles_;       // of that order
  int64_t columns_ = 0;           // of the widest a
  std::unique_ptr<float[]> low_;  // [order, columns]: x @ a

  void take(const Slot& factors, int64_t slot) {
    const int64_t first = order_.size();
    for (int64_t row = 0; row < all_.rows; ++row)
      if (all_.slots[row] == slot) order_.push_back(row);
    const int64_t count = order_.size() - first, tiles = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = tile * count / tiles, end = (tile + 1) * count / tiles;
      tiles_.push_back({factors, first + begin, end - begin});
    }
    if (count > 0) columns_ = std::max(columns_, up_to_vector(factors.before(outputs_.parts)));
  }

  void multiply_a(const Tile& tile, int64_t panel) const {
    tile.slot.is_narrow() ? multiply_a_of<uint16_t>(tile, panel) : multiply_a_of<float>(tile, panel);
  }

  template <typename Stored>
  void multiply_a_of(const Tile& tile, int64_t panel) const {
    const int64_t left = tile.slot.before(outputs_.parts) - panel * kPanelWidth;
    if (left <= 0) return;
    const float* x[kRowsAtOnce];
    float* low[kRowsAtOnce];
    for (int64_t row = 0; row < tile.count; ++row) {
      x[row] = all_.x + order_[tile.begin + row] * all_.depth;
      low[row] = &low_[(tile.begin + row) * columns_];
    }
    const auto multiply = left > kWidth ? multiply_panels_of<kPanelVectors, Stored>(tile.count)
                                        : multiply_panels_of<1, Stored>(tile.count);
    multiply(x, tile.slot.a<Stored>(panel), all_.depth, low, panel * kPanelWidth, 1, false);
  }

  // Adds the products with some panels of all parts' b.
  void multiply_b(const Tile& tile, int64_t begin, int64_t end) const {
    for (int64_t part = 0, count; part < outputs_.parts; ++part, begin -= count, end -= count) {
      count = panels_of(outputs_.count(part));
      const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, count);
      tile.slot.is_narrow() ? multiply_b_of<uint16_t>(tile, part, first, last) : multiply_b_of<float>(tile, part, first, last);
    }
  }

  template <typename Stored>
  void multiply_b_of(const Tile& tile, int64_t part, int64_t begin, int64_t end) const {
    const int64_t rank = tile.slot.rank(part);
    if (rank == 0 || begin >= end) return;
    const float* low[kRowsAtOnce];
    float* out[kRowsAtOnce];
    for (int64_t row = 0; row < tile.count; ++row) {
      low[row] = &low_[(tile.begin + row) * columns_ + tile.slot.before(part)];
      out[row] = all_.out + order_[tile.begin + row] * outputs_.width;
    }
    const auto multiply = multiply_panels_of<kPanelVectors, Stored>(tile.count);
    const Stored* b = tile.slot.b<Stored>(outputs_, part, begin);
    for (int64_t panel = begin, count; panel < end; panel += count, b += count * rank * kPanelWidth) {
      count = std::min(end - panel, outputs_.panels_in_run(part, panel));
      if (count > 0) {
        multiply(low, b, rank, out, outputs_.place(part, panel * kPanelWidth), count, true);
        continue;
      }
      float products[kRowsAtOnce][kPanelWidth];
      float* rows[kRowsAtOnce];
      for (int64_t row = 0; row < tile.count; ++row) rows[row] = products[row];
      multiply(low, b, rank, rows, 0, count = 1, false);
      for (int64_t row = 0; row < tile.count; ++row) scatter(part, panel, rows[row], out[row]);
    }
  }

  // Adds a panel that hangs over a part's last output, or is in several runs.
  void scatter(int64_t part, int64_t panel, const float* products, float* out) const {
    const int64_t first = panel * kPanelWidth, end = std::min(outputs_.count(part), first + kPanelWidth);
    for (int64_t output = first; output < end; ++output) out[outputs_.place(part, output)] += products[output - first];
  }
};

// (products f32 of x by a kernel, x f32, the slot s32 of each row or -1, the factors s32 of all slots, runs s32 of outputs)
// -> the products with those of the adapters, in the same memory
const char* add_adapters(const Call& call) {
  const Buffer x = call.arg(1), slots = call.arg(2), words = call.arg(3), runs = call.arg(4), out = call.result(0);
  if (out.data() != call.arg(0).data()) return "the products are elsewhere";
  const SlottedRows rows{x.floats(), out.floats(), slots.ints(), slots.size(), x.dim(-1)};
  Adapters(rows, {runs.ints(), runs.size(), out.dim(-1)}, words.ints(), words.dim(0), words.dim(1)).add();
  return nullptr;
}

}  // namespace odriver

ODRIVER_HANDLER(odriver_add_adapters, odriver::add_adapters)
