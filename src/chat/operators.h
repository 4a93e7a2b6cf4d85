// Operators of numbers, texts and lists.
#pragma once

#include <string>

#include "chat/value.h"

namespace fsdp::chat {

// a SIGN b, where SIGN is one of + - * / // % **.
Value binary(Machine& machine, const std::string& sign, const Value& a, const Value& b);
Value negative(Machine& machine, const Value& value);
Value positive(Machine& machine, const Value& value);

// Whether Python's `a SIGN b` holds: == != < <= > >= in, not in.
bool holds(Machine& machine, const std::string& sign, const Value& a, const Value& b);

// text % values, as Python's formatting with % does it.
Value format_percent(Machine& machine, const Text& text, const Values& values);

}  // namespace fsdp::chat
