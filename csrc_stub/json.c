#include "json.h"

#include <string.h>

enum { MAX_DEPTH = 16 };
static const char SPACE[] = " \t\n\r";

/* Where the parser stands. A function that returns false leaves `at` at the offending byte. */
typedef struct {
  const char *at;
  const char *end;
  size_t depth;
} Cursor;

bool text_is(Text text, const char *expected) {
  return text.size == strlen(expected) && !memcmp(text.at, expected, text.size);
}

static bool next_is(const Cursor *c, char expected) { return c->at < c->end && *c->at == expected; }

static bool take(Cursor *c, char expected) {
  if (!next_is(c, expected)) return false;
  c->at++;
  return true;
}

static bool take_one_of(Cursor *c, const char *choices) {
  for (; *choices; choices++)
    if (take(c, *choices)) return true;
  return false;
}

static void skip_space(Cursor *c) {
  while (take_one_of(c, SPACE)) continue;
}

static bool skip_word(Cursor *c, const char *word) {
  for (; *word; word++)
    if (!take(c, *word)) return false;
  return true;
}

static bool is_digit(const Cursor *c) { return c->at < c->end && *c->at >= '0' && *c->at <= '9'; }

static bool skip_digits(Cursor *c) {
  if (!is_digit(c)) return false;
  while (is_digit(c)) c->at++;
  return true;
}

static bool skip_number(Cursor *c) {
  take(c, '-');
  if (!take(c, '0') && !skip_digits(c)) return false;
  if (take(c, '.') && !skip_digits(c)) return false;
  if (!take(c, 'e') && !take(c, 'E')) return true;
  if (!take(c, '+')) take(c, '-');
  return skip_digits(c);
}

static bool skip_escape(Cursor *c) {
  if (!take(c, 'u')) return take_one_of(c, "\"\\/bfnrt");
  for (int digit = 0; digit < 4; digit++)
    if (!take_one_of(c, "0123456789abcdefABCDEF")) return false;
  return true;
}

static bool is_text(char c) { return (unsigned char)c >= ' ' && (unsigned char)c < 0x80; }

static bool skip_string(Cursor *c) {
  if (!take(c, '"')) return false;
  while (!take(c, '"')) {
    if (c->at == c->end || !is_text(*c->at)) return false;
    if (*c->at++ == '\\' && !skip_escape(c)) return false;
  }
  return true;
}

static bool skip_value(Cursor *c);

static bool skip_member(Cursor *c) {
  skip_space(c);
  if (!skip_string(c)) return false;
  skip_space(c);
  return take(c, ':') && skip_value(c);
}

static bool skip_list(Cursor *c, char close, bool (*skip_item)(Cursor *)) {
  if (c->depth == MAX_DEPTH) return false;
  c->depth++;
  c->at++;
  skip_space(c);
  if (!take(c, close)) {
    do {
      if (!skip_item(c)) return false;
    } while (take(c, ','));
    if (!take(c, close)) return false;
  }
  c->depth--;
  return true;
}

/* Skips one value and the space on both sides of it. */
static bool skip_value(Cursor *c) {
  skip_space(c);
  if (c->at == c->end) return false;
  bool is_value;
  switch (*c->at) {
    case '{': is_value = skip_list(c, '}', skip_member); break;
    case '[': is_value = skip_list(c, ']', skip_value); break;
    case '"': is_value = skip_string(c); break;
    case 't': is_value = skip_word(c, "true"); break;
    case 'f': is_value = skip_word(c, "false"); break;
    case 'n': is_value = skip_word(c, "null"); break;
    default: is_value = skip_number(c);
  }
  if (is_value) skip_space(c);
  return is_value;
}

static Text between(const char *start, const char *end) {
  while (end > start && strchr(SPACE, end[-1])) end--;
  return (Text){start, (size_t)(end - start)};
}

bool json_check(Text document, Text *value, Message *why) {
  Cursor c = {document.at, document.at + document.size, 0};
  skip_space(&c);
  const char *start = c.at;
  if (!skip_value(&c) || c.at != c.end) {
    size_t offset = (size_t)(c.at - document.at);
    if (c.depth == MAX_DEPTH && (next_is(&c, '{') || next_is(&c, '[')))
      return refuse(why, "the config must nest at most %d deep, got more at byte %zu", MAX_DEPTH,
                    offset);
    return refuse(why, "the config must be JSON in ASCII, got an error at byte %zu of %zu", offset,
                  document.size);
  }
  *value = between(start, c.at);
  return true;
}

static Text skipped(Cursor *c, bool (*skip)(Cursor *)) {
  skip_space(c);
  const char *start = c->at;
  skip(c);
  return between(start, c->at);
}

size_t json_members(Text object, const char *name, Text *value) {
  Cursor c = {object.at + 1, object.at + object.size - 1, 0};
  size_t count = 0;
  skip_space(&c);
  while (c.at < c.end) {
    Text key = skipped(&c, skip_string);
    skip_space(&c);
    take(&c, ':');
    Text found = skipped(&c, skip_value);
    take(&c, ',');
    if (text_is((Text){key.at + 1, key.size - 2}, name)) {
      *value = found;
      count++;
    }
  }
  return count;
}

size_t json_elements(Text array, Text *elements, size_t capacity) {
  Cursor c = {array.at + 1, array.at + array.size - 1, 0};
  size_t count = 0;
  skip_space(&c);
  while (c.at < c.end) {
    Text element = skipped(&c, skip_value);
    take(&c, ',');
    if (count < capacity) elements[count] = element;
    count++;
  }
  return count;
}
