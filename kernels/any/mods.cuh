// What functions of the user, a ScoreMod and a MaskMod, are given: the place of a score and the values that they
// captured. cupyflash/mods.py writes them, as the struct UserMods, behind the source of a kernel:
//   kScore, kMask                  which of them there are
//   kReads                         whether they read arrays for every score
//   Number score(Number, Element)  Number: float, or Dual for the derivative as well
//   bool visible(Element)
#pragma once

#include "any/dropout.cuh"
#include "any/ptx.cuh"
#include "core/dual.cuh"

namespace cupyflash {

// A kernel's parameters, followed by the functions, if there are any.
template <class Params, class Mods>
struct Modified : Params {
  alignas(64) Mods mods;
};
template <class Params>
struct Modified<Params, NoMods> : Params {};

// The same struct as a kernel sees it that knows but its first parameters, and how many bytes the functions are behind.
template <class Params, class Mods, int kAt>
struct alignas(64) ModifiedAt {
  char bytes[kAt + sizeof(Mods)];

  __device__ __forceinline__ const Params& params() const { return reinterpret_cast<const Params&>(bytes); }
  __device__ __forceinline__ const Mods& mods() const { return reinterpret_cast<const Mods&>(bytes[kAt]); }
};
template <class Params, int kAt>
struct ModifiedAt<Params, NoMods, kAt> : Params {
  __device__ __forceinline__ const Params& params() const { return *this; }
  __device__ __forceinline__ NoMods mods() const { return {}; }
};

namespace mod {

struct Element {  // batch, query head, query, key
  int b, h, i, j, seqlen_q, seqlen_k;
  float offset;  // j - i: exact below 2^24
};

template <class T>
struct Items {
  using Value = T;
  __device__ __forceinline__ static T load(const T* item) { return __ldg(item); }
};
template <>
struct Items<bool> {
  using Value = bool;
  __device__ __forceinline__ static bool load(const bool* item) {
    return __ldg(reinterpret_cast<const unsigned char*>(item));
  }
};
template <class T>
struct Items16 {
  using Value = float;
  __device__ __forceinline__ static float load(const T* item) {
    return T::unpack(__ldg(reinterpret_cast<const unsigned short*>(item))).x;
  }
};
template <>
struct Items<float16> : Items16<float16> {};
template <>
struct Items<bfloat16> : Items16<bfloat16> {};

// A captured array: name[x, y] of the user's text is name(x, y) here. No index is checked.
template <class T, int kAxes>
struct alignas(8) Captured {
  const T* data;
  int strides[kAxes];  // in elements; twin: Capture.words

  template <class... Indices>
  __device__ __forceinline__ int64 offset(Indices... indices) const {
    static_assert(sizeof...(indices) == kAxes, "an index for each axis");
    int64 offset = 0;
    int axis = 0;
    ((offset += term(indices, strides[axis++])), ...);
    return offset;
  }
  __device__ __forceinline__ static int64 term(int64 index, int stride) { return index * stride; }
  __device__ __forceinline__ static int64 term(int index, int stride) { return int64(indivisible(index)) * stride; }
  template <class... Indices>
  __device__ __forceinline__ auto operator()(Indices... indices) const {
    return Items<T>::load(data + offset(indices...));
  }
};

struct Trace {  // counts reads, for the gradients of what is captured: sm80/mod_gradient.cuh
  int looked_at, count = 0;
  float* target = nullptr;  // where the gradient of that read is

  template <class Array, class Gradient>
  struct Read {
    const Array& array;
    const Gradient& gradient;
    Trace& trace;

    template <class... Indices>
    __device__ __forceinline__ Dual operator()(Indices... indices) const {
      const bool looked_at = trace.count++ == trace.looked_at;
      if (looked_at) trace.target = const_cast<float*>(gradient.data) + gradient.offset(indices...);
      return {array(indices...), looked_at ? 1.f : 0.f};
    }
  };
  template <class Array, class Gradient>
  __device__ __forceinline__ Read<Array, Gradient> of(const Array& array, const Gradient& gradient) {
    return {array, gradient, *this};
  }
};

// Where the scores belong that a lane holds of a fragment of kCols columns, which begins at (row, col).
template <Rows kRows, int kCols>
struct Places {
  Element of[2];       // of both rows, but for the column; offset: in the lane's first column
  int col;             // the lane's first
  bool inside;         // all columns exist
  bool whole = false;  // a block mask says that all is shown: a MaskMod is not asked

  __device__ __forceinline__ static Places from(const Sizes& s, int batch, int head, int row, int col) {
    return from(s, batch, col, [&](int) { return head; }, [&](int half) { return row + Accumulator<8>::row(half); });
  }
  // `head(half)` and `row(half)` of both rows.
  template <class Head, class Row>
  __device__ __forceinline__ static Places from(const Sizes& s, int batch, int col, Head head, Row row) {
    constexpr bool kQueries = kRows == Rows::kQueries;
    Places places;
    places.inside = col + kCols <= (kQueries ? s.seqlen_k : s.seqlen_q);
    places.col = col + Accumulator<8>::col();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = ::min(row(half), (kQueries ? s.seqlen_q : s.seqlen_k) - 1);
      const float offset = float(kQueries ? places.col - own : own - places.col);
      places.of[half] = {batch, head(half), kQueries ? own : 0, kQueries ? 0 : own, s.seqlen_q, s.seqlen_k, offset};
    }
    return places;
  }
  // That of x[j][i]. Where it does not exist, unless all do, that of the last one that does.
  template <bool kInside>
  __device__ __forceinline__ Element at(int j, int i) const {
    constexpr bool kQueries = kRows == Rows::kQueries;
    Element place = of[i / 2];
    int own = col + 8 * j + i % 2;
    if (!kInside) own = ::min(own, (kQueries ? place.seqlen_k : place.seqlen_q) - 1);
    (kQueries ? place.j : place.i) = own;
    // One addition, where the conversion of a difference takes two instructions.
    const float step = kInside ? float(8 * j + i % 2) : float(own - col);
    place.offset += kQueries ? step : -step;
    return place;
  }
};

// What takes the place of a score; `whole` is that of `Places`.
template <class Number, class Mods>
__device__ __forceinline__ Number changed(const Mods& mods, Number x, const Element& at, bool whole = false) {
  if constexpr (Mods::kScore) x = mods.score(x, at);
  if constexpr (Mods::kMask)
    if (!(whole | mods.visible(at))) x = Number(-kInfinity);  // | : a branch for each score would cost more
  return x;
}
// And the derivative, where that of the score is `tangent`.
template <class Mods>
__device__ __forceinline__ Dual changed(const Mods& mods, float x, float tangent, const Element& at,
                                        bool whole = false) {
  return changed(mods, Dual{x, tangent}, at, whole);
}

}  // namespace mod
}  // namespace cupyflash
