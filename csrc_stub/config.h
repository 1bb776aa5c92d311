/* What a host call is to compute, read from the custom call's opaque string. */
#ifndef NEURONMM_CONFIG_H
#define NEURONMM_CONFIG_H

#include <stddef.h>

#include "message.h"

typedef enum { OP_XW, OP_XUV, OP_SVD_MLP } Op;
typedef enum { FLOAT32, BFLOAT16, FLOAT16 } Dtype;
typedef enum { SILU, GELU, GELU_TANH, RELU } Activation;

enum { PACKED_TILE = 128 }; /* rows of a NeuronCore's tile: the unit of packed order */

typedef struct {
  Op op;
  Dtype dtype;
  Activation activation; /* of svd_mlp */
  size_t M, K, N;
  size_t inner;    /* I of svd_mlp */
  size_t ranks[3]; /* xuv: r; svd_mlp: gate, up, down */
  bool packed;     /* u's rows are in packed order */
  bool bias;
} Config;

/* Reads base64 of the JSON document; `why` says what is wrong with it when the result is false. */
bool config_parse(Config *config, const char *opaque, size_t size, Message *why);

#endif
