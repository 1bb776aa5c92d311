#include "host_call.h"

#include <stdatomic.h>

#include "compute.h"
#include "config.h"

typedef void StatusFailure(void *status, const char *message, size_t size);

static _Atomic(StatusFailure *) status_failure;
static atomic_long computed;

static void fail(void *status, const Message *why) {
  char line[sizeof why->text + 32];
  int size = snprintf(line, sizeof line, "neuronmm host call: %s", why->text);
  StatusFailure *report = atomic_load(&status_failure);
  if (report)
    report(status, line, (size_t)size);
  else
    fprintf(stderr, "%s\n", line);
}

void neuronmm_host_call(void *out, const void **in, const char *opaque, size_t opaque_len,
                        void *status) {
  Config config;
  Message why;
  if (config_parse(&config, opaque, opaque_len, &why) && compute(&config, in, out, &why))
    atomic_fetch_add(&computed, 1);
  else
    fail(status, &why);
}

void neuronmm_set_status_failure(StatusFailure *function) {
  atomic_store(&status_failure, function);
}

long neuronmm_host_call_count(void) { return atomic_load(&computed); }
