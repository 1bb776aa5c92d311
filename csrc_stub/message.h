#ifndef NEURONMM_MESSAGE_H
#define NEURONMM_MESSAGE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

/* One line that says why a call is refused. */
typedef struct {
  char text[320];
} Message;

/* Writes the message and is false: a check can `return refuse(why, format, ...)`. */
#define refuse(why, ...) (message_write(why, __VA_ARGS__), false)

__attribute__((format(printf, 2, 3))) static inline void message_write(Message *message,
                                                                       const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(message->text, sizeof message->text, format, values);
  va_end(values);
  /* A value may be quoted from the config; the message stays one line. */
  for (char *c = message->text; *c; c++)
    if (*c < ' ') *c = ' ';
}

#endif
