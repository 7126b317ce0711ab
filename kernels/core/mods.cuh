// What functions of the user, a ScoreMod and a MaskMod, are given: the place of a score and the values that they
// captured. cupyflash/mods.py writes them, as the struct UserMods, behind the source of a kernel:
//   kScore, kMask                  which of them there are
//   Number score(Number, Element)  Number: float, or Dual for the derivative as well
//   bool visible(Element)
#pragma once

#include "any/ptx.cuh"
#include "core/dropout.cuh"
#include "core/dual.cuh"

namespace cupyflash {

// A kernel's parameters, followed by the functions, if there are any.
template <class Params, class Mods>
struct Modified : Params {
  alignas(64) Mods mods;
};
template <class Params>
struct Modified<Params, NoMods> : Params {};

template <class Params>
__device__ __forceinline__ constexpr NoMods mods_of(const Modified<Params, NoMods>&) {
  return {};
}
template <class Params, class Mods>
__device__ __forceinline__ const Mods& mods_of(const Modified<Params, Mods>& p) {
  return p.mods;
}

namespace mod {

struct Element {  // batch, query head, query, key
  int b, h, i, j, seqlen_q, seqlen_k;
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
    ((offset += int64(indices) * strides[axis++]), ...);
    return offset;
  }
  template <class... Indices>
  __device__ __forceinline__ auto operator()(Indices... indices) const {
    return Items<T>::load(data + offset(indices...));
  }
};

// at(j, i): the place of x[j][i] of a fragment; where it does not exist, unless all do, that of the last one that does.
template <Rows kRows, bool kInside>
struct At {
  using Dual = mod::Dual;
  const Element (&first)[2];

  __device__ __forceinline__ Element operator()(int j, int i) const {
    Element place = first[i / 2];
    int& col = kRows == Rows::kQueries ? place.j : place.i;
    col += 8 * j + i % 2;
    if (!kInside) col = ::min(col, (kRows == Rows::kQueries ? place.seqlen_k : place.seqlen_q) - 1);
    return place;
  }
};

// Where the scores belong that a lane holds of a fragment of kCols columns, which begins at (row, col).
template <Rows kRows, int kCols>
struct Places {
  Element first[2];  // of both rows
  bool inside;       // all columns exist

  __device__ __forceinline__ static Places from(const Sizes& s, int batch, int head, int row, int col) {
    constexpr bool kQueries = kRows == Rows::kQueries;
    Places places;
    places.inside = col + kCols <= (kQueries ? s.seqlen_k : s.seqlen_q);
    col += Accumulator<8>::col();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + Accumulator<8>::row(half);
      places.first[half] = {batch,
                            head,
                            kQueries ? ::min(own, s.seqlen_q - 1) : col,
                            kQueries ? col : ::min(own, s.seqlen_k - 1),
                            s.seqlen_q,
                            s.seqlen_k};
    }
    return places;
  }
  template <bool kInside>
  __device__ __forceinline__ At<kRows, kInside> at() const {
    return {first};
  }
};

// What takes the place of a score.
template <class Number, class Mods>
__device__ __forceinline__ Number changed(const Mods& mods, Number x, const Element& at) {
  if constexpr (Mods::kScore) x = mods.score(x, at);
  if constexpr (Mods::kMask)
    if (!mods.visible(at)) x = Number(-kInfinity);
  return x;
}

}  // namespace mod
}  // namespace cupyflash
