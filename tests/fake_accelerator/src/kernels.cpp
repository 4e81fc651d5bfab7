// Kernels of the fake device: every operator runs the CPU's kernel on the same memory, and what it makes is moved to the
// device. Written by hand are only those that make, copy and reshape tensors, and those that draw or choose by device.
#include "fake.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <cstring>
#include <set>

// From torch/csrc/autograd/graph_task.h, which takes seconds to compile.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace fake {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

// ---- tensors of the device and of the host

c10::DispatchKeySet device_keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& shape) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), shape.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return tensor;
}

// The same memory, as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr memory(storage.mutable_data(), c10::Device(c10::kCPU));
  // If a kernel resizes it, it moves to memory of the host.
  auto* host = c10::GetAllocator(c10::kCPU);
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), host, true);
  return tensor_over(std::move(same), c10::DispatchKey::CPU, tensor);
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(), device_keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(), device_keys(), c10::dtype_or_default(dtype));
}

// A copy on the device of what a kernel has made on the host.
at::Tensor to_device(const at::Tensor& made) {
  auto dtype = made.scalar_type();
  bool dense = made.is_non_overlapping_and_dense();
  at::Tensor moved = dense ? empty_strided(made.sizes(), made.strides(), dtype, {}, {}, {})
                           : empty_memory_format(made.sizes(), dtype, {}, {}, {}, {});
  on_host(moved).copy_(made);
  return moved;
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
}

// ---- what a profiler sees of a kernel: its memory on the device, and nothing of how it is done on the host

class OnlyOfTheDevice final : public c10::MemoryReportingInfoBase {
 public:
  explicit OnlyOfTheDevice(c10::DebugInfoBase* profiler)
      : profiler_(static_cast<c10::MemoryReportingInfoBase*>(profiler)) {}
  void reportMemoryUsage(void* pointer, int64_t size, size_t allocated, size_t reserved, c10::Device device) override {
    if (device.type() == kDevice)
      profiler_->reportMemoryUsage(pointer, size, allocated, reserved, device);
  }
  void reportOutOfMemory(int64_t size, size_t allocated, size_t reserved, c10::Device device) override {
    if (device.type() == kDevice)
      profiler_->reportOutOfMemory(size, allocated, reserved, device);
  }
  bool memoryProfilingEnabled() const override {
    return false;
  }

 private:
  c10::MemoryReportingInfoBase* profiler_;
};

std::shared_ptr<c10::DebugInfoBase> only_of_the_device() {
  auto* profiler = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return profiler ? std::make_shared<OnlyOfTheDevice>(profiler) : nullptr;
}

struct Hidden {
  c10::DebugInfoGuard memory{c10::DebugInfoKind::PROFILER_STATE, only_of_the_device()};
  at::DisableRecordFunctionGuard operators;
  at::AutoDispatchBelowADInplaceOrView autograd;
};

// ---- operators with a character of their own

using Names = std::set<std::string>;

// Operators that take tensors of the CPU beside those of the device, as on CUDA.
const Names kTakeHostTensors{
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_pack_padded_sequence",
    "aten::_pad_packed_sequence"};

// Operators whose result's size depends on data: the host waits for it.
const Names kWait{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};

const Names kProducts{"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};

// Operators of backward passes that add in any order.
const Names kNoisy{
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution_backward",
    "aten::embedding_dense_backward"};

bool is_noisy(const std::string& name) {
  // A recomputed forward pass runs inside the backward pass too, but builds a graph.
  bool backward = torch::autograd::get_current_graph_task_id() >= 0 && !c10::GradMode::is_enabled();
  return knobs().noise && backward && kNoisy.count(name) && !at::globalContext().deterministicAlgorithms();
}

template <class Bits>
void nudge(const at::Tensor& tensor) {
  auto* bits = static_cast<Bits*>(tensor.data_ptr());
  uint64_t random = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (i % 64 == 0)
      random = next_noise();
    // One unit in the last place towards zero; zero and one above it stay.
    if ((random >> (i % 64) & 1) && (bits[i] & (static_cast<Bits>(~Bits(0)) >> 1)) > 1)
      bits[i]--;
  }
}

// Change half of the elements by one unit in the last place, other ones at every call.
void add_noise(const at::Tensor& made) {
  if (!made.defined() || !made.is_floating_point() || !made.is_non_overlapping_and_dense())
    return;
  switch (made.element_size()) {
    case 2:
      return nudge<uint16_t>(made);
    case 4:
      return nudge<uint32_t>(made);
    case 8:
      return nudge<uint64_t>(made);
  }
}

// ---- the kernel of every operator

// One call of an operator, whose arguments lie on the stack.
class Kernel {
 public:
  Kernel(const OperatorHandle& op, Stack* stack) : op_(op), name_(op.schema().name()), stack_(stack) {}

  void run() {
    check_alive();
    count("kernels");
    {
      Hidden hidden;
      lend_all();
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
      take_back();
      fetch_all();
    }
    timeline().launch(bytes_, flops_);
    if (waits_ || kWait.count(name_))
      timeline().wait_for_all();
  }

 private:
  struct Lent {
    at::Tensor device;
    at::Tensor host;
  };

  void lend_all() {
    const auto& arguments = op_.schema().arguments();
    size_t first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack_)[first + i];
      if (arguments[i].name() == "generator")
        value = host_generator(value.isNone() ? std::nullopt : std::optional(value.toGenerator()));
      else if (value.isDevice())
        value = c10::Device(c10::kCPU);
      else
        lend_value(value, arguments[i].is_out());
    }
  }

  void lend_value(c10::IValue& value, bool out) {
    if (value.isTensor()) {
      value = lend(value.toTensor(), out);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> lent;
      for (const at::Tensor& tensor : value.toTensorVector())
        lent.push_back(lend(tensor, out));
      value = lent;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> lent;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        lent.push_back(tensor ? std::optional(lend(*tensor, out)) : std::nullopt);
      value = lent;
    }
  }

  at::Tensor lend(const at::Tensor& tensor, bool out) {
    if (!tensor.defined())
      return tensor;
    check_dtype(tensor);
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(
          tensor.dim() == 0 || kTakeHostTensors.count(name_),
          "Expected all tensors to be on the same device, but found at least two devices, fake:0 and ",
          tensor.device(), "! (when calling ", name_, ")");
      return tensor;
    }
    bytes_ += bytes_of(tensor);
    lent_.push_back({tensor, on_host(tensor)});
    if (!out && tensor.dim())
      inner_ = std::exchange(last_inner_, tensor.size(-1));
    if (out)
      made_.push_back(lent_.back().host);
    return lent_.back().host;
  }

  void check_dtype(const at::Tensor& tensor) {
    bool lacking = (tensor.scalar_type() == at::kBFloat16 && lacks(kBFloat16)) ||
        (tensor.scalar_type() == at::kHalf && lacks(kHalf));
    TORCH_CHECK_NOT_IMPLEMENTED(!lacking, "fake: \"", name_, "\" not implemented for '", tensor.scalar_type(), "'");
  }

  // Results that the kernel wrote where it was told to: it may have resized them.
  void take_back() {
    for (const at::Tensor& made : made_)
      finish(made);
    for (const Lent& lent : lent_) {
      if (lent.device.sizes() != lent.host.sizes())
        lent.device.resize_(lent.host.sizes());
      if (lent.device.storage().data() != lent.host.storage().data())
        on_host(lent.device).copy_(lent.host);
    }
  }

  void fetch_all() {
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = fetch(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> fetched;
        for (const at::Tensor& tensor : value.toTensorVector())
          fetched.push_back(fetch(tensor));
        value = fetched;
      } else {
        waits_ = true;
      }
    }
  }

  // The device's tensor for one that the kernel returned: an argument, a view of one, or something new.
  at::Tensor fetch(const at::Tensor& made) {
    if (!made.defined())
      return made;
    for (const Lent& lent : lent_)
      if (made.is_same(lent.host))
        return lent.device;
    for (const Lent& lent : lent_)
      if (made.storage().data() && made.storage().data() == lent.host.storage().data())
        return tensor_over(lent.device.storage(), c10::DispatchKey::PrivateUse1, made);
    check_dtype(made);
    bytes_ += bytes_of(made);
    finish(made);
    return to_device(made);
  }

  // What a result costs beside its bytes, and the noise in it.
  void finish(const at::Tensor& made) {
    if (kProducts.count(name_))
      flops_ = 2.0 * static_cast<double>(made.numel() * inner_) * static_cast<double>(made.element_size()) / 4;
    if (is_noisy(name_))
      add_noise(made);
  }

  const OperatorHandle& op_;
  const std::string& name_;
  Stack* stack_;
  std::vector<Lent> lent_;
  std::vector<at::Tensor> made_;
  int64_t bytes_ = 0;
  double flops_ = 0;
  // Last dimensions of the last argument but one, a product's left factor, and of the last.
  int64_t inner_ = 0, last_inner_ = 0;
  bool waits_ = false;
};

void run_kernel(const OperatorHandle& op, Stack* stack) {
  Kernel(op, stack).run();
}

// ---- copies

void copy_on_host(const at::Tensor& from, const at::Tensor& to) {
  Hidden hidden;
  at::Tensor source = from.is_privateuseone() ? on_host(from) : from;
  at::Tensor target = to.is_privateuseone() ? on_host(to) : to;
  if (target.numel())
    target.copy_(source);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check_alive();
  count("copies");
  copy_on_host(from, to);
  timeline().launch(bytes_of(from) + bytes_of(to), 0);
  bool within = from.is_privateuseone() && to.is_privateuseone();
  bool in_flight = non_blocking && to.is_privateuseone();
  if (!within && !in_flight)
    timeline().wait_for_all();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  check_alive();
  count("item");
  timeline().launch(bytes_of(tensor), 0);
  timeline().wait_for_all();
  Hidden hidden;
  return on_host(tensor).item();
}

// ---- views and storages: no kernel runs

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

// Give a tensor's storage room for the tensor's elements.
void make_room(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), impl->dtype().itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes())
    resize_storage(tensor.storage(), needed);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  make_room(tensor);
  return tensor;
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.data() || sizes.empty()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  make_room(tensor);
  return tensor;
}

at::Tensor& set_empty(at::Tensor& tensor) {
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return set_storage(tensor, std::move(empty), 0, c10::SymIntArrayRef(c10::SymInt(0)), {});
}

void record_stream(at::Tensor&, c10::Stream) {}

// ---- operators that ask what device they are on

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto bools = input.options().dtype(at::kBool);
  if (!train.value_or(true))
    return {input.clone(), at::ones_like(input, bools)};
  at::Tensor mask = at::empty_like(input, bools).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

int64_t fused_sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  constexpr int64_t kMath = 0;
  return kMath;
}

void convolution(const OperatorHandle&, Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_kernel(op, stack);
}

void convolution_backward(const OperatorHandle& overrideable, Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // It takes the sizes of the bias, after the weight, which the overrideable one does not.
  auto first = stack->end() - static_cast<int64_t>(overrideable.schema().arguments().size());
  const at::Tensor weight = first[2].toTensor();
  bool transposed = first[6].toBool();
  int64_t channels = transposed ? weight.size(1) * first[8].toInt() : weight.size(0);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{channels}));
  run_kernel(op, stack);
}

// One step of an LSTM or a GRU: torch asks accelerators for a fused kernel, which the CPU lacks. It is given in parts,
// which autograd sees one by one.

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = with_bias(of_input, input_bias) + with_bias(of_hidden, hidden_bias);
  auto parts = gates.chunk(4, 1);
  at::Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates.detach()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto in = with_bias(of_input, input_bias).chunk(3, 1), own = with_bias(of_hidden, hidden_bias).chunk(3, 1);
  at::Tensor reset = (in[0] + own[0]).sigmoid(), update = (in[1] + own[1]).sigmoid();
  at::Tensor next = (in[2] + reset * own[2]).tanh();
  return {next + update * (hidden - next), next.detach()};
}

void return_default_generator(const OperatorHandle&, Stack* stack) {
  stack->push_back(default_generator());
}

}  // namespace
}  // namespace fake

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::run_kernel>());
}

// torch would run such an operator by its variant that writes to an argument, and a profiler would see both.
bool has_a_kernel_of_its_own(const c10::OperatorName& name) {
  auto op = c10::Dispatcher::singleton().findOp(name);
  return op && name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto composite = c10::DispatchKey::CompositeExplicitAutogradNonFunctional;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(composite))
    if (has_a_kernel_of_its_own(name))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fake::run_kernel>());
  m.impl("empty.memory_format", fake::empty_memory_format);
  m.impl("empty_strided", fake::empty_strided);
  m.impl("_copy_from", fake::copy_from);
  m.impl("_copy_from_and_resize", fake::copy_from_and_resize);
  m.impl("_local_scalar_dense", fake::local_scalar);
  m.impl("view", fake::view);
  m.impl("_reshape_alias", fake::reshape_alias);
  m.impl("as_strided", fake::as_strided);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", fake::resize);
  m.impl("set_", fake::set_empty);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", fake::set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", fake::record_stream);
  m.impl("native_dropout", fake::native_dropout);
  m.impl("_fused_sdp_choice", fake::fused_sdp_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fake::convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fake::convolution_backward>());
}

// Without the second key, they would not run in inference mode.
#define CELLS(key)                                               \
  TORCH_LIBRARY_IMPL(aten, key, m) {                             \
    m.impl("_thnn_fused_lstm_cell", fake::lstm_cell);            \
    m.impl("_thnn_fused_gru_cell", fake::gru_cell);              \
  }
CELLS(AutogradPrivateUse1)
CELLS(PrivateUse1)

TORCH_LIBRARY(fake_accelerator, m) {
  m.def(
      "default_generator() -> Generator",
      torch::CppFunction::makeFromBoxedFunction<&fake::return_default_generator>());
}
