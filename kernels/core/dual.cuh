// Dual numbers (W. K. Clifford, 1873): a float and its derivative, carried through whatever the text of a ScoreMod
// computes. Such a text sees the functions of this namespace; cupyflash/dual.py is the same for NumPy. What meets a
// Dual as a float has no derivative, and costs none.
#pragma once

#include "core/score.cuh"

namespace cupyflash::mod {

constexpr float inf = kInfinity;

struct Dual {
  float value, tangent;

  __device__ __forceinline__ Dual(float value, float tangent = 0.f) : value(value), tangent(tangent) {}

  __device__ __forceinline__ friend Dual operator+(Dual a) { return a; }
  __device__ __forceinline__ friend Dual operator-(Dual a) { return {-a.value, -a.tangent}; }
  __device__ __forceinline__ friend Dual operator+(Dual a, Dual b) {
    return {a.value + b.value, a.tangent + b.tangent};
  }
  __device__ __forceinline__ friend Dual operator+(Dual a, float b) { return {a.value + b, a.tangent}; }
  __device__ __forceinline__ friend Dual operator+(float a, Dual b) { return {a + b.value, b.tangent}; }
  __device__ __forceinline__ friend Dual operator-(Dual a, Dual b) {
    return {a.value - b.value, a.tangent - b.tangent};
  }
  __device__ __forceinline__ friend Dual operator-(Dual a, float b) { return {a.value - b, a.tangent}; }
  __device__ __forceinline__ friend Dual operator-(float a, Dual b) { return {a - b.value, -b.tangent}; }
  __device__ __forceinline__ friend Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, a.tangent * b.value + a.value * b.tangent};
  }
  __device__ __forceinline__ friend Dual operator*(Dual a, float b) { return {a.value * b, a.tangent * b}; }
  __device__ __forceinline__ friend Dual operator*(float a, Dual b) { return {a * b.value, a * b.tangent}; }
  __device__ __forceinline__ friend Dual operator/(Dual a, Dual b) {
    const float result = a.value / b.value;
    return {result, (a.tangent - result * b.tangent) / b.value};
  }
  __device__ __forceinline__ friend Dual operator/(Dual a, float b) { return {a.value / b, a.tangent / b}; }
  __device__ __forceinline__ friend Dual operator/(float a, Dual b) {
    const float result = a / b.value;
    return {result, -result * b.tangent / b.value};
  }
  template <class Other>
  __device__ __forceinline__ Dual& operator+=(Other other) {
    return *this = *this + other;
  }
  template <class Other>
  __device__ __forceinline__ Dual& operator-=(Other other) {
    return *this = *this - other;
  }
  template <class Other>
  __device__ __forceinline__ Dual& operator*=(Other other) {
    return *this = *this * other;
  }
  template <class Other>
  __device__ __forceinline__ Dual& operator/=(Other other) {
    return *this = *this / other;
  }
  __device__ __forceinline__ friend bool operator<(Dual a, Dual b) { return a.value < b.value; }
  __device__ __forceinline__ friend bool operator>(Dual a, Dual b) { return a.value > b.value; }
  __device__ __forceinline__ friend bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
  __device__ __forceinline__ friend bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
  __device__ __forceinline__ friend bool operator==(Dual a, Dual b) { return a.value == b.value; }
  __device__ __forceinline__ friend bool operator!=(Dual a, Dual b) { return a.value != b.value; }
};

template <class A, class B>
__device__ __forceinline__ auto where(bool condition, A a, B b) {
  return condition ? a : b;
}
// Of equal numbers the first, and its derivative; of a number and NaN the first, too.
template <class A, class B>
__device__ __forceinline__ auto min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
__device__ __forceinline__ auto max(A a, B b) {
  return b > a ? b : a;
}

__device__ __forceinline__ int abs(int x) { return ::abs(x); }
__device__ __forceinline__ int64 abs(int64 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ float exp(float x) { return expf(x); }
__device__ __forceinline__ float log(float x) { return logf(x); }
__device__ __forceinline__ float sqrt(float x) { return sqrtf(x); }
// sinf and cosf keep a table in local memory, for huge angles: these are exact to 1e-6 up to some thousand.
__device__ __forceinline__ float within_turn(float x) {
  const float turns = rintf(x * 0.159154943f);
  return fmaf(turns, 1.7484556e-7f, fmaf(turns, -6.28318548f, x));
}
__device__ __forceinline__ float sin(float x) { return __sinf(within_turn(x)); }
__device__ __forceinline__ float cos(float x) { return __cosf(within_turn(x)); }
__device__ __forceinline__ float tanh(float x) { return Tanh::of<true>(x).value; }
__device__ __forceinline__ float pow(float x, float y) { return powf(x, y); }

__device__ __forceinline__ Dual abs(Dual x) {
  return {fabsf(x.value), x.value > 0.f ? x.tangent : x.value < 0.f ? -x.tangent : 0.f};
}
__device__ __forceinline__ Dual exp(Dual x) {
  const float result = expf(x.value);
  return {result, result * x.tangent};
}
__device__ __forceinline__ Dual log(Dual x) { return {logf(x.value), x.tangent / x.value}; }
__device__ __forceinline__ Dual sqrt(Dual x) {
  const float result = sqrtf(x.value);
  return {result, 0.5f * x.tangent / result};
}
__device__ __forceinline__ Dual sin(Dual x) { return {sin(x.value), cos(x.value) * x.tangent}; }
__device__ __forceinline__ Dual cos(Dual x) { return {cos(x.value), -sin(x.value) * x.tangent}; }
__device__ __forceinline__ Dual tanh(Dual x) {
  const Tanh t = Tanh::of<true>(x.value);
  return {t.value, t.derivative * x.tangent};
}
__device__ __forceinline__ Dual pow(Dual x, float y) {
  return {powf(x.value, y), y * powf(x.value, y - 1.f) * x.tangent};
}
__device__ __forceinline__ Dual pow(float x, Dual y) {
  const float result = powf(x, y.value);
  return {result, logf(x) * result * y.tangent};
}
__device__ __forceinline__ Dual pow(Dual x, Dual y) {
  const Dual of_y = pow(x.value, y);
  return {of_y.value, of_y.tangent + y.value * powf(x.value, y.value - 1.f) * x.tangent};
}

}  // namespace cupyflash::mod
