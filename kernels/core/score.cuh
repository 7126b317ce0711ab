// What happens to a score between the product and the mask: softcap, cap * tanh(scale * x / cap), then ALiBi (arXiv
// 2108.12409), minus slope * distance from the diagonal, and a bias, which the kernel reads. What comes out is in base
// 2: the exponent of exp2.
#pragma once

#include "core/fragment.cuh"
#include "core/params.cuh"

namespace cupyflash {

// t and 1 - t^2. The latter is 4 e / (1 + e)^2, e = exp(-2 |u|): no digits are lost where t is near 1, and it is 0
// where e is. !kFar, all of some scores are small, leaves out what none of them needs: t is the same, bit for bit, and
// 1 - t^2, now from t, but for rounding.
struct Tanh {
  static constexpr float kSeries = 0.25f;  // below it t by a series: 1 - 2 e / (1 + e) would lose digits
  float value, derivative;

  template <bool kFar>
  __device__ __forceinline__ static Tanh of(float u) {
    const float square = u * u;
    float t = fmaf(square, -0.0514330491f, 0.133242637f);  // error below 3e-9 t
    t = fmaf(u * square, fmaf(square, t, -0.333332419f), u);
    if constexpr (!kFar) return {t, fmaf(-t, t, 1.f)};
    const float e = exp2f(-2 * kLog2E * fabsf(u)), twice = __fdividef(1.f, fmaf(e, 0.5f, 0.5f)), rest = e * twice;
    t = opaque(t);  // or each score gets a branch of its own
    const bool near = fabsf(u) < kSeries;
    return {near ? t : copysignf(1.f - rest, u), rest * twice};
  }
};

// Where the two rows of a lane meet the diagonal, in columns from its first one on, and their slopes.
struct Slant {
  float origin[2], slope[2];
};

template <int kCols>
struct Weights {  // rounded: P, and P times the derivative of softcap
  uint32 prob[kCols / 16][4], changed[kCols / 16][4];
};

struct NoMods {  // no functions of the user: any/mods.cuh
  static constexpr bool kScore = false, kMask = false;
};

template <class Mods>
struct ScoreOf {  // without the MaskMod
  static constexpr bool kScore = Mods::kScore, kMask = false;
  const Mods& mods;

  template <class Number, class Element>
  __device__ __forceinline__ Number score(Number x, const Element& at) const {
    return mods.score(x, at);
  }
};

template <bool kSoftcap, bool kAlibi, bool kBias = false, class Mods = NoMods>
struct ScoreChange {
  static constexpr bool kModded = Mods::kScore || Mods::kMask;
  static constexpr bool kNatural = Mods::kScore;  // a ScoreMod gets natural logits, and leaves them
  static constexpr bool kAny = kSoftcap || kAlibi || kBias || kModded;
  static constexpr bool kDerived = kSoftcap || Mods::kScore;  // the derivative is not 1
  const Score& score;
  const Sizes& sizes;

  // What the online softmax multiplies with.
  __device__ __forceinline__ float scale_log2() const { return kNatural ? kLog2E : kAny ? 1.f : sizes.scale_log2; }
  __device__ __forceinline__ float scale() const { return kNatural ? 1.f : kAny ? kLn2 : sizes.scale; }

  __device__ __forceinline__ float slope(int batch, int head) const {
    if constexpr (!kAlibi) return 0.f;
    return score.slopes[batch * score.batch + head * score.head] * (kNatural ? 1.f : kLog2E);
  }
  // Of columns from `first_col` on. `place(half)`: the one at the distance 0 from the row of this lane; `slope(half)`:
  // its head's.
  template <class Place, class Slope>
  __device__ __forceinline__ Slant slant(int first_col, Place place, Slope slope) const {
    Slant slant = {};
    if constexpr (kAlibi)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        slant.origin[half] = float(place(half) - first_col - Accumulator<8>::col()), slant.slope[half] = slope(half);
    return slant;
  }

  // Scores -> exponents, or natural logits for functions of the user. `base(j, i)` is added to x[j][i]: minus the
  // maximum, or 0.
  template <int kPart = 2, int kCols, class Base>
  __device__ __forceinline__ void apply(Accumulator<kCols>& x, const Slant& slant, Base base) const {
    const auto take = [&](int j, const float (&exponent)[4], const float (&)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[j][i] = exponent[i];
    };
    if constexpr (kSoftcap && !kNatural) {
      if (all_near(x)) return cap<false>(x, slant, base);
#pragma unroll
      for (int first = 0; first < kCols / 8; first += kPart) {
#pragma unroll
        for (int j = first; j < first + kPart; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) x.x[j][i] = opaque(x.x[j][i]);  // or squares are made ahead, for both ways
        if (all_near(x, first, kPart))
          cap<false>(x, slant, base, first, kPart);
        else
          cap<true>(x, slant, base, first, kPart);
      }
    } else {
      each<kPart>(x, slant, base, take);
    }
  }

  // Whether the series of `cap` serves all scores of these columns that the warp holds.
  template <int kCols>
  __device__ __forceinline__ bool all_near(const Accumulator<kCols>& x, int first = 0, int count = kCols / 8) const {
    float largest[4] = {};  // four, or each comparison waits for the one before
#pragma unroll
    for (int j = first; j < first + count; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i] = fmaxf(largest[i], fabsf(x.x[j][i]));
    const float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    return !__any_sync(kFullWarp, most >= score.near);
  }
  // Softcap of a score is score * series(score^2) up to `near`: four instructions, with that of the exponent. What it
  // computes there does not depend on kFar.
  // In pairs of float16, whose unit leaves wgmma its registers, the series would keep 4 digits of the logits.
  template <bool kFar, int kCols, class Base>
  __device__ __forceinline__ void cap(Accumulator<kCols>& x, const Slant& slant, Base base, int first = 0,
                                      int count = kCols / 8) const {
#pragma unroll
    for (int j = first; j < first + count; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& y = x.x[j][i];
        const float offset = with_alibi(slant, j, i, base(j, i)), square = y * y;
        const float rest = fmaf(square, score.series[2], score.series[1]);
        const float series = fmaf(square, rest, score.series[0]);
        const float near = fmaf(y, series, offset);
        if constexpr (kFar) {
          const float far = fmaf(Tanh::of<true>(y * score.inside).value, score.cap, offset);
          y = fabsf(y) < score.near ? near : far;
        } else {
          y = near;
        }
      }
  }

  // For the backward: scores -> P. With softcap, P only becomes an operand, for dv, and what takes the place of the
  // scores is P times the derivative, the factor of dS: both are made here, where the derivative is known. kTight:
  // where few registers are left, that becomes an operand as well, kPart * 8 columns at a time. `base(j, i)`: minus the
  // lse of x[j][i].
  template <class T, bool kTight, int kPart = 2, int kCols, class Base>
  __device__ __forceinline__ void weigh(Accumulator<kCols>& x, Weights<kCols>& rounded, const Slant& slant,
                                        Base base) const {
    each<kPart>(x, slant, base, [&](int j, const float (&exponent)[4], const float (&derivative)[4]) {
      float (&p)[4] = x.x[j];
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = exp2f(exponent[i]);
      if constexpr (kSoftcap) {
        round<T>(rounded.prob, j, p);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] *= derivative[i];
        if constexpr (kTight) round<T>(rounded.changed, j, p);
      }
    });
  }
  // The same with functions of the user. `places` says where a score belongs, `bias(j, i)` is in base 2.
  template <int kPart = 2, int kCols, class Places, class Bias>
  __device__ __forceinline__ void apply_mods(Accumulator<kCols>& x, const Slant& slant, const Mods& mods,
                                             const Places& places, Bias bias) const {
    if constexpr (Mods::kMask)
      if (places.whole) {
        if constexpr (Mods::kScore)
          return Whole{score, sizes}.template apply_mods<kPart>(x, slant, {mods}, places, bias);
        else
          return Plain{score, sizes}.template apply<2>(x, slant, bias);
      }
    if (places.inside)
      apply_at<true, kPart>(x, slant, mods, places, bias);
    else
      apply_at<false, kPart>(x, slant, mods, places, bias);
  }
  // `minus_lse(j, i)` is minus the lse.
  template <class T, bool kTight, int kPart = 2, int kCols, class Places, class Bias, class Lse>
  __device__ __forceinline__ void weigh_mods(Accumulator<kCols>& x, Weights<kCols>& rounded, const Slant& slant,
                                             const Mods& mods, const Places& places, Bias bias, Lse minus_lse) const {
    if constexpr (Mods::kMask)
      if (places.whole) {
        if constexpr (Mods::kScore)
          return Whole{score, sizes}.template weigh_mods<T, kTight, kPart>(x, rounded, slant, {mods}, places, bias,
                                                                           minus_lse);
        else
          return Plain{score, sizes}.template weigh<T, kTight, kPart>(
              x, rounded, slant, [&](int j, int i) { return bias(j, i) + minus_lse(j, i); });
      }
    if (places.inside)
      weigh_at<true, T, kTight, kPart>(x, rounded, slant, mods, places, bias, minus_lse);
    else
      weigh_at<false, T, kTight, kPart>(x, rounded, slant, mods, places, bias, minus_lse);
  }
  // For the gradient of a bias: what `apply` left -> P times the derivative of the functions alone.
  template <int kCols, class Places, class Lse>
  __device__ __forceinline__ void multiply_mods(Accumulator<kCols>& x, const Mods& mods, Places places,
                                                Lse minus_lse) const {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      __syncwarp();  // as in `each`
      places.col = opaque(places.col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto y = changed(mods, x.x[j][i], 1.f, places.template at<false>(j, i), places.whole);
        const float p = exp2f(in_base_2(y.value, minus_lse(i)));
        x.x[j][i] = p == 0.f ? 0.f : p * y.tangent;
      }
    }
  }

  // After it, what `visible(row)`, a Range of columns, leaves out -> 0.
  template <int kCols, class Visible>
  __device__ __forceinline__ void hide(Accumulator<kCols>& x, Weights<kCols>& rounded, int first_row, int first_col,
                                       Visible visible) const {
    x.each_hidden(first_row, first_col, visible, [&](int j, int i) {
      x.x[j][i] = 0.f;
      if constexpr (kDerived) clear(rounded.prob, j, i), clear(rounded.changed, j, i);
    });
  }
  // And what a mask does not show.
  template <int kCols, class Shown>
  __device__ __forceinline__ void hide_masked(Accumulator<kCols>& x, Weights<kCols>& rounded, Shown shown) const {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      __syncwarp();  // as in `each`
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!shown(j, i)) {
          x.x[j][i] = 0.f;
          if constexpr (kDerived) clear(rounded.prob, j, i), clear(rounded.changed, j, i);
        }
    }
  }

 private:
  // Where a MaskMod is not asked: beside a ScoreMod, and alone.
  using Whole = ScoreChange<kSoftcap, kAlibi, kBias, ScoreOf<Mods>>;
  using Plain = ScoreChange<kSoftcap, kAlibi, kBias>;

  // What functions of the user left, minus the lse.
  __device__ __forceinline__ static float in_base_2(float value, float minus_lse) {
    return kNatural ? logit_minus_lse(value, -minus_lse) : value + minus_lse;
  }
  __device__ __forceinline__ static float with_alibi(const Slant& slant, int j, int i, float offset) {
    if constexpr (!kAlibi) return offset;
    return fmaf(-slant.slope[i / 2], fabsf(slant.origin[i / 2] - float(8 * j + i % 2)), offset);
  }
  template <bool kInside, int kPart, int kCols, class Places, class Bias>
  __device__ __forceinline__ void apply_at(Accumulator<kCols>& x, const Slant& slant, const Mods& mods, Places places,
                                           Bias bias) const {
    each<kPart>(x, slant, bias, [&](int j, const float (&logit)[4], const float (&)[4]) {
      if (j % kPart == 0) places.col = opaque(places.col);  // what the function reads there is not read ahead of all
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[j][i] = changed(mods, logit[i], places.template at<kInside>(j, i));
    });
  }
  // A weight of 0 has no gradient, whatever the derivative is there.
  template <bool kInside, class T, bool kTight, int kPart, int kCols, class Places, class Bias, class Lse>
  __device__ __forceinline__ void weigh_at(Accumulator<kCols>& x, Weights<kCols>& rounded, const Slant& slant,
                                           const Mods& mods, Places places, Bias bias, Lse minus_lse) const {
    each<kPart>(x, slant, bias, [&](int j, const float (&logit)[4], const float (&derivative)[4]) {
      if (j % kPart == 0) places.col = opaque(places.col);
      float (&p)[4] = x.x[j];
      float tangent[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto y = changed(mods, logit[i], derivative[i], places.template at<kInside>(j, i));
        p[i] = exp2f(in_base_2(y.value, minus_lse(j, i))), tangent[i] = y.tangent;
      }
      if constexpr (kDerived) {
        round<T>(rounded.prob, j, p);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = p[i] == 0.f ? 0.f : p[i] * tangent[i];
        if constexpr (kTight) round<T>(rounded.changed, j, p);
      }
    });
  }
  // `use(j, exponent, derivative)` of the columns 8 * j, 8 * j + 1 in both rows. Part by part: with all scores on their
  // way at once the compiler has not enough registers.
  template <int kPart, int kCols, class Base, class Use>
  __device__ __forceinline__ void each(Accumulator<kCols>& x, const Slant& slant, Base base, Use use) const {
#pragma unroll
    for (int first = 0; first < kCols / 8; first += kPart) {
      bool far = false;
      if constexpr (kBias || kModded)
        __syncwarp();  // or all loads go ahead of all parts, into registers that are not there
      if constexpr (kSoftcap) {
        float largest = 0.f;
#pragma unroll
        for (int j = first; j < first + kPart; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) x.x[j][i] *= score.inside, largest = fmaxf(largest, fabsf(x.x[j][i]));
        far = __any_sync(kFullWarp, largest >= Tanh::kSeries);
      }
      if (far)
        each_of<true, kPart>(x, first, slant, base, use);
      else
        each_of<false, kPart>(x, first, slant, base, use);
    }
  }
  template <bool kFar, int kPart, int kCols, class Base, class Use>
  __device__ __forceinline__ void each_of(Accumulator<kCols>& x, int first, const Slant& slant, Base base,
                                          Use use) const {
#pragma unroll
    for (int j = first; j < first + kPart; ++j) {
      float exponent[4], derivative[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float offset = base(j, i), factor = sizes.scale_log2;
        if constexpr (kNatural) offset *= kLn2, factor = sizes.scale;
        offset = with_alibi(slant, j, i, offset);
        Tanh t = {x.x[j][i], 1.f};
        if constexpr (kSoftcap) t = Tanh::of<kFar>(x.x[j][i]), factor = kNatural ? score.cap * kLn2 : score.cap;
        exponent[i] = fmaf(t.value, factor, offset), derivative[i] = t.derivative;
      }
      use(j, exponent, derivative);
    }
  }
};

}  // namespace cupyflash
