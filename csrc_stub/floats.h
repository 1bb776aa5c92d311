/* bfloat16 and float16 as bits, to and from float: round to nearest even, NaN stays NaN. Integer
 * arithmetic throughout, for the caller's thread may flush subnormals. */
#ifndef NEURONMM_FLOATS_H
#define NEURONMM_FLOATS_H

#include <stdint.h>
#include <string.h>

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float from_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t to_bfloat16(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* a quiet NaN */
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_float16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  uint32_t magnitude = half & 0x7fff, shifted = magnitude << 13;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | shifted); /* Inf, NaN */
  if (magnitude >= 0x0400) return float_of(sign | (shifted + (112u << 23)));
  /* A subnormal is its fraction of 2^-14. */
  return float_of(sign | bits_of(float_of(0x38800000 | shifted) - 0x1p-14f));
}

static inline uint16_t to_float16(float value) {
  uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00;  /* NaN */
  if (magnitude >= 0x477ff000) return sign | 0x7c00; /* 65520 and above round to Inf */
  if (magnitude >= 0x38800000)                       /* 2^-14: a normal float16 */
    return sign | (uint16_t)((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
  if (magnitude <= 0x33000000) return sign; /* 2^-25 ties to zero */
  uint32_t shift = 126 - (magnitude >> 23), fraction = (magnitude & 0x7fffff) | 0x800000;
  uint32_t half = 1u << (shift - 1), rest = fraction & (2 * half - 1), kept = fraction >> shift;
  return sign | (uint16_t)(kept + (rest > half || (rest == half && kept & 1)));
}

#endif
