/* As much JSON as a config needs: check a document, then look up members and elements. */
#ifndef NEURONMM_JSON_H
#define NEURONMM_JSON_H

#include <stddef.h>

#include "message.h"

/* A piece of a document, not NUL-terminated. A value starts and ends without white space. */
typedef struct {
  const char *at;
  size_t size;
} Text;

bool text_is(Text text, const char *expected);

/* Checks that the document is one ASCII JSON value and returns it without the space around it. */
bool json_check(Text document, Text *value, Message *why);

/* The rest takes checked values only. */

/* Counts the object's members of this name, as it is written; `value` is the last one's. */
size_t json_members(Text object, const char *name, Text *value);

/* Counts the array's elements and returns the first `capacity` of them. */
size_t json_elements(Text array, Text *elements, size_t capacity);

#endif
