#include "checkpoint/dtype.h"

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

using c10::ScalarType;

struct NamedDtype {
  ScalarType type;
  const char* name;
  const char* storage;
};

constexpr NamedDtype kDtypeNames[] = {
    {ScalarType::Float, "float32", "FloatStorage"},
    {ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    {ScalarType::Half, "float16", "HalfStorage"},
    {ScalarType::Double, "float64", "DoubleStorage"},
    {ScalarType::Long, "int64", "LongStorage"},
    {ScalarType::Int, "int32", "IntStorage"},
    {ScalarType::Short, "int16", "ShortStorage"},
    {ScalarType::Char, "int8", "CharStorage"},
    {ScalarType::Byte, "uint8", "ByteStorage"},
    {ScalarType::Bool, "bool", "BoolStorage"},
    {ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    {ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    {ScalarType::UInt16, "uint16", nullptr},
    {ScalarType::UInt32, "uint32", nullptr},
    {ScalarType::UInt64, "uint64", nullptr},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn", nullptr},
    {ScalarType::Float8_e5m2, "float8_e5m2", nullptr},
    {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", nullptr},
    {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", nullptr},
};

const NamedDtype& entry(ScalarType type) {
  for (const auto& named : kDtypeNames)
    if (named.type == type) return named;
  throw Error(formatted("tensors of type {} can't be saved.", c10::toString(type)),
              "convert the tensor to a type that PyTorch's files support, such as float32.");
}

}  // namespace

const char* dtype_name(ScalarType type) {
  return entry(type).name;
}

const char* storage_name(ScalarType type) {
  return entry(type).storage;
}

std::optional<ScalarType> dtype_of(const std::string& name) {
  for (const auto& named : kDtypeNames)
    if (name == named.name) return named.type;
  return std::nullopt;
}

std::optional<ScalarType> dtype_of_storage(const std::string& name) {
  for (const auto& named : kDtypeNames)
    if (named.storage && name == named.storage) return named.type;
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
