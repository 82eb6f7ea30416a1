// What a CPU build of torch lacks to run the shapes of CUDA tensors forward and backward: a device guard that guards
// nothing, the hooks by which torch asks for devices and for pinned memory, kernels that only CUDA has, and the choice
// of attention's kernel.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <set>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct FakeGuard final : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override {
    return {CUDA, 0};
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return {CUDA, 0};
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0});
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0});
  }
};

// Memory of the host that says of itself that it is pinned.
std::set<const void*>& pinned() {
  static std::set<const void*> starts;
  return starts;
}

struct FakePinned final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = std::malloc(size + 1);
    pinned().insert(start);
    return {start, start, &free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  static void free(void* start) {
    pinned().erase(start);
    std::free(start);
  }
};

struct FakeHooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  int getNumGPUs() const override {
    return 1;
  }
  c10::DeviceIndex current_device() const override {
    return 0;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static FakePinned allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* start) const override {
    return pinned().count(start) > 0;
  }
};

// Torch makes the hooks of a build without CUDA as it is imported, and keeps them.
static_assert(sizeof(FakeHooks) == sizeof(at::CUDAHooksInterface));
[[maybe_unused]] const auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) FakeHooks;

// Never called: tensors without numbers take torch's own shapes. That CUDA has them keeps torch from taking them apart.
void no_kernel(const c10::OperatorHandle& operation, c10::Stack*) {
  TORCH_CHECK(false, operation.schema().name(), " has no kernel on a CUDA device that computes nothing");
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const char* name : {"_fused_rms_norm", "_fused_rms_norm_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_kernel>());
  }
}

// Flash attention where CUDA has it, and memory-efficient attention elsewhere.
int64_t attention_kernel(
    const at::Tensor& queries,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  const bool has_flash = !mask.has_value() && queries.element_size() == 2 && queries.size(-1) <= 256;
  return static_cast<int64_t>(has_flash ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::efficient_attention);
}

} // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &attention_kernel)
} // namespace at::native

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)
