// Autocast on the fake device: the operators that CUDA casts, cast as CUDA casts them.
#include "fake.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace fake {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

template <class Change>
void change_tensors(const OperatorHandle& op, Stack* stack, Change change) {
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& tensor : value.toTensorVector())
        changed.push_back(change(tensor));
      value = changed;
    }
  }
}

void cast_all(const OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  change_tensors(op, stack, [dtype](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kDevice) : tensor;
  });
}

void call_without_autocast(const OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  op.callBoxed(stack);
}

void lower_precision(const OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  cast_all(op, stack, at::autocast::get_lower_precision_fp_from_device_type(kDevice));
  op.callBoxed(stack);
}

void full_precision(const OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  cast_all(op, stack, at::kFloat);
  op.callBoxed(stack);
}

bool is_low(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined())
    return false;
  auto dtype = value.toTensor().scalar_type();
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Ask for a result in full precision, unless the caller asks for another.
void full_result(const OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone() && is_low((*stack)[first]))
      (*stack)[first + i] = static_cast<int64_t>(at::kFloat);
  call_without_autocast(op, stack);
}

void widest(const OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  bool full = false;
  change_tensors(op, stack, [&full](const at::Tensor& tensor) {
    full = full || (tensor.defined() && tensor.scalar_type() == at::kFloat);
    return tensor;
  });
  if (full)
    cast_all(op, stack, at::kFloat);
  op.callBoxed(stack);
}

// "conv2d" or "conv_transpose2d, input", as torch's lists write an operator and its overload.
std::string operator_name(std::string listed) {
  auto comma = listed.find(", ");
  return comma == std::string::npos ? listed : listed.replace(comma, 2, ".");
}

}  // namespace
}  // namespace fake

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define IMPLEMENT(function, ...) \
  m.impl(fake::operator_name(#__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&function>());
#define LOWER(...) IMPLEMENT(fake::lower_precision, __VA_ARGS__)
#define FULL(...) IMPLEMENT(fake::full_precision, __VA_ARGS__)
#define RESULT(...) IMPLEMENT(fake::full_result, __VA_ARGS__)
#define WIDEST(...) IMPLEMENT(fake::widest, __VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(RESULT)
  AT_FORALL_PROMOTE(WIDEST)
  FULL(norm, Scalar)
  FULL(norm, ScalarOpt_dim)
}
