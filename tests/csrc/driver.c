/* Makes the host calls that come on stdin, each a 4-byte length and an opaque string, with buffers
 * of exactly the config's sizes. Answers each with a line: the message, or the config as JSON. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "host_call.h"

enum { MAX_INPUTS = 7, LARGEST_RUN = 1 << 20 };

static void print_message(void *status, const char *message, size_t size) {
  (void)status;
  printf("%.*s\n", (int)size, message);
}

/* Entries of each operand, in the order of the op's schema; 0 past the last. */
static void operand_sizes(const Config *c, double sizes[MAX_INPUTS]) {
  double K = (double)c->K, N = (double)c->N, I = (double)c->inner, r = (double)c->ranks[0];
  double up = (double)c->ranks[1], down = (double)c->ranks[2], x = (double)c->M * K;
  double bias = c->bias ? N : 0;
  double by_op[][MAX_INPUTS] = {
      [OP_XW] = {x, K * N, bias},
      [OP_XUV] = {x, K * r, r * N, bias},
      [OP_SVD_MLP] = {x, K * r, r * I, K * up, up * I, I * down, down * N},
  };
  memcpy(sizes, by_op[c->op], sizeof by_op[c->op]);
}

/* Makes the call unless it is a large one. */
static void make_call(const Config *c, const char *opaque, size_t size) {
  double sizes[MAX_INPUTS], work = (double)c->M * (double)(c->N + c->inner);
  operand_sizes(c, sizes);
  for (int i = 0; i < MAX_INPUTS; i++) work += sizes[i];
  if (work > LARGEST_RUN) return;

  size_t entry = c->dtype == FLOAT32 ? 4 : 2;
  void *in[MAX_INPUTS];
  for (int i = 0; i < MAX_INPUTS; i++) {
    size_t bytes = (size_t)sizes[i] * entry;
    in[i] = malloc(bytes);
    memset(in[i], 0x11, bytes);
  }
  void *out = malloc(c->M * c->N * entry);
  neuronmm_host_call(out, (const void **)in, opaque, size, NULL);
  for (int i = 0; i < MAX_INPUTS; i++) free(in[i]);
  free(out);
}

static void print_config(const Config *c) {
  printf("{\"op\": %d, \"dtype\": %d, \"M\": %zu, \"K\": %zu, \"N\": %zu, \"inner\": %zu, "
         "\"ranks\": [%zu, %zu, %zu], \"packed\": %d, \"bias\": %d, \"activation\": %d}\n",
         (int)c->op, (int)c->dtype, c->M, c->K, c->N, c->inner, c->ranks[0], c->ranks[1],
         c->ranks[2], c->packed, c->bias, (int)c->activation);
}

int main(void) {
  neuronmm_set_status_failure(print_message);
  for (uint32_t size; fread(&size, sizeof size, 1, stdin) == 1; fflush(stdout)) {
    char *opaque = malloc(size);
    if (fread(opaque, 1, size, stdin) != size) return 1;
    Config config;
    Message why;
    if (config_parse(&config, opaque, size, &why)) {
      make_call(&config, opaque, size);
      print_config(&config);
    } else {
      neuronmm_host_call(NULL, NULL, opaque, size, NULL);
    }
    free(opaque);
  }
  return 0;
}
