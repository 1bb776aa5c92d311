#include "config.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define MAX_OPAQUE ((size_t)64 << 20) /* a compiled kernel and its config are far smaller */
#define MAX_SIZE 2147483647
#define SHOWN(value) (int)((value).size < 40 ? (value).size : 40), (value).at

static const char *const OPS[] = {"xw", "xuv", "svd_mlp"};
static const char *const DTYPES[] = {"float32", "bfloat16", "float16"};
static const char *const ACTIVATIONS[] = {"silu", "gelu", "gelu_tanh", "relu"};
static const size_t RANKS[] = {[OP_XW] = 0, [OP_XUV] = 1, [OP_SVD_MLP] = 3};

/* --- base64 ---------------------------------------------------------------------------------- */

static int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes 4 bytes or a multiple into `out`, which has room for 3 for every 4. */
static bool base64_decode(const char *in, size_t size, char *out, size_t *out_size, Message *why) {
  size_t padding = 0;
  while (padding < 2 && in[size - 1 - padding] == '=') padding++;
  uint32_t bits = 0;
  for (size_t i = 0; i < size; i++) {
    int digit = i < size - padding ? base64_digit(in[i]) : 0;
    if (digit < 0)
      return refuse(why, "the opaque string must be base64, got byte 0x%02x at %zu",
                    (unsigned char)in[i], i);
    bits = bits << 6 | (uint32_t)digit;
    if (i % 4 == 3)
      for (int byte = 0; byte < 3; byte++) *out++ = (char)(bits >> (16 - 8 * byte) & 0xff);
  }
  *out_size = size / 4 * 3 - padding;
  return true;
}

/* --- members --------------------------------------------------------------------------------- */

static bool get(Text object, const char *name, Text *value, Message *why) {
  size_t count = json_members(object, name, value);
  if (count != 1)
    return refuse(why, "the config must have \"%s\" exactly once, got it %zu times", name, count);
  return true;
}

static bool to_size(Text value, long minimum, long maximum, const char *name, size_t *size,
                    Message *why) {
  long number = 0;
  size_t digits = 0;
  for (; digits < value.size && number <= maximum; digits++) {
    char c = value.at[digits];
    if (c < '0' || c > '9') break;
    number = number * 10 + (c - '0');
  }
  if (digits < value.size || number < minimum || number > maximum)
    return refuse(why, "%s must be an integer in %ld..%ld, got %.*s", name, minimum, maximum,
                  SHOWN(value));
  *size = (size_t)number;
  return true;
}

static bool get_size(Text object, const char *name, size_t *size, Message *why) {
  Text value;
  return get(object, name, &value, why) && to_size(value, 1, MAX_SIZE, name, size, why);
}

static bool get_bool(Text object, const char *name, bool *flag, Message *why) {
  Text value;
  if (!get(object, name, &value, why)) return false;
  *flag = text_is(value, "true");
  if (!*flag && !text_is(value, "false"))
    return refuse(why, "%s must be true or false, got %.*s", name, SHOWN(value));
  return true;
}

static bool get_choice(Text object, const char *name, const char *const *choices, size_t count,
                       unsigned *choice, Message *why) {
  Text value;
  if (!get(object, name, &value, why)) return false;
  char listed[64] = "";
  for (unsigned i = 0; i < count; i++) {
    Text unquoted = {value.at + 1, value.size - 2};
    if (*value.at == '"' && text_is(unquoted, choices[i])) {
      *choice = i;
      return true;
    }
    if (i) strcat(listed, ", ");
    strcat(listed, choices[i]);
  }
  return refuse(why, "%s must be one of %s; got %.*s", name, listed, SHOWN(value));
}

static bool get_ranks(Text object, Config *config, Message *why) {
  Text value, ranks[COUNT(config->ranks)];
  if (!get(object, "ranks", &value, why)) return false;
  size_t expected = RANKS[config->op];
  size_t count = *value.at == '[' ? json_elements(value, ranks, COUNT(ranks)) : SIZE_MAX;
  if (count != expected)
    return refuse(why, "ranks of %s must be a list of %zu, got %.*s", OPS[config->op], expected,
                  SHOWN(value));
  for (size_t i = 0; i < count; i++)
    if (!to_size(ranks[i], 1, MAX_SIZE, "a rank", &config->ranks[i], why)) return false;
  return true;
}

/* `inner` and `activation` belong to svd_mlp; elsewhere they are 0 and null. */
static bool get_mlp(Text object, Config *config, Message *why) {
  Text value;
  if (!get(object, "inner", &value, why)) return false;
  if (config->op == OP_SVD_MLP) {
    unsigned activation = 0;
    if (!to_size(value, 1, MAX_SIZE, "inner", &config->inner, why) ||
        !get_choice(object, "activation", ACTIVATIONS, COUNT(ACTIVATIONS), &activation, why))
      return false;
    config->activation = (Activation)activation;
    return true;
  }
  if (!to_size(value, 0, 0, "inner of an op other than svd_mlp", &config->inner, why) ||
      !get(object, "activation", &value, why))
    return false;
  return text_is(value, "null") ||
         refuse(why, "activation of an op other than svd_mlp must be null, got %.*s", SHOWN(value));
}

/* --- rules that join members ------------------------------------------------------------------ */

static bool check_flags(const Config *config, Message *why) {
  if (config->packed && config->op != OP_XUV)
    return refuse(why, "packed must be false for %s, got true", OPS[config->op]);
  if (config->packed && config->K % PACKED_TILE)
    return refuse(why, "packed needs K a multiple of %d, got K=%zu", PACKED_TILE, config->K);
  if (config->bias && config->op == OP_SVD_MLP)
    return refuse(why, "bias must be false for svd_mlp, got true");
  return true;
}

/* Checks that every matrix fits the address space. */
static bool check_bytes(const Config *config, Message *why) {
  size_t K = config->K, N = config->N, inner = config->inner;
  size_t longest = K > N ? K : N, rank = config->op == OP_XW ? (K < N ? K : N) : 0;
  if (inner > longest) longest = inner;
  for (size_t i = 0; i < RANKS[config->op]; i++)
    if (config->ranks[i] > rank) rank = config->ranks[i];
  if (longest > PTRDIFF_MAX / sizeof(float) / rank)
    return refuse(why, "matrices must be smaller than 2^63 bytes, got K=%zu N=%zu inner=%zu and a "
                       "rank of %zu", K, N, inner, rank);
  return true;
}

static bool read_document(Config *config, Text document, Message *why) {
  Text root, object;
  if (!json_check(document, &root, why)) return false;
  if (*root.at != '{')
    return refuse(why, "the config must be a JSON object, got %.*s", SHOWN(root));
  if (!get(root, "neuronmm", &object, why)) return false;
  if (*object.at != '{')
    return refuse(why, "\"neuronmm\" must be a JSON object, got %.*s", SHOWN(object));
  unsigned op = 0, dtype = 0;
  if (!get_choice(object, "op", OPS, COUNT(OPS), &op, why) ||
      !get_choice(object, "dtype", DTYPES, COUNT(DTYPES), &dtype, why))
    return false;
  config->op = (Op)op;
  config->dtype = (Dtype)dtype;
  return get_size(object, "M", &config->M, why) && get_size(object, "K", &config->K, why) &&
         get_size(object, "N", &config->N, why) && get_ranks(object, config, why) &&
         get_mlp(object, config, why) && get_bool(object, "packed", &config->packed, why) &&
         get_bool(object, "bias", &config->bias, why) && check_flags(config, why) &&
         check_bytes(config, why);
}

static bool read_opaque(Config *config, const char *opaque, size_t size, Message *why) {
  if (size == 0 || size > MAX_OPAQUE)
    return refuse(why, "the opaque string must have 1..%zu bytes, got %zu", MAX_OPAQUE, size);
  if (size % 4)
    return refuse(why, "the opaque string must be padded base64, got %zu bytes", size);
  char *decoded = malloc(size / 4 * 3);
  if (!decoded) return refuse(why, "no memory to decode a config of %zu bytes", size);
  Text document = {decoded, 0};
  bool is_config = base64_decode(opaque, size, decoded, &document.size, why) &&
                   read_document(config, document, why);
  free(decoded);
  return is_config;
}

bool config_parse(Config *config, const char *opaque, size_t size, Message *why) {
  *config = (Config){0};
  Message wrong;
  return read_opaque(config, opaque, size, &wrong) ||
         refuse(why, "%.240s; lower the model with the version of neuronmm_ops that built this "
                     "library", wrong.text);
}
