#ifndef NEURONMM_COMPUTE_H
#define NEURONMM_COMPUTE_H

#include "config.h"

/* Computes the op on contiguous row-major operands, in the order of the op's schema; the buffers
 * have the sizes that the config says. */
bool compute(const Config *config, const void *const *in, void *out, Message *why);

#endif
