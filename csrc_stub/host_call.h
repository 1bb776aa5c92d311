/* XLA:CPU's handler of the custom call AwsNeuronCustomNativeKernel: what the kernel would compute
 * on a NeuronCore, computed on the host. */
#ifndef NEURONMM_HOST_CALL_H
#define NEURONMM_HOST_CALL_H

#include <stddef.h>

#define NEURONMM_EXPORTED __attribute__((visibility("default")))

/* The handler, of XLA's API_VERSION_STATUS_RETURNING_UNIFIED. `opaque` need not be NUL-terminated.
 * XLA does not tell the sizes of the buffers, so they have to be what the config says. */
NEURONMM_EXPORTED void neuronmm_host_call(void *out, const void **in, const char *opaque,
                                          size_t opaque_len, void *status);

/* Tells the handler where XLA's XlaCustomCallStatusSetFailure is. Until then a refused call is a
 * line on stderr, and leaves its output as it was. */
NEURONMM_EXPORTED void neuronmm_set_status_failure(void (*function)(void *status,
                                                                    const char *message,
                                                                    size_t size));

/* Calls that computed a result, of all threads. */
NEURONMM_EXPORTED long neuronmm_host_call_count(void);

#endif
