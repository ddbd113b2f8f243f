// What torch built for CPUs asks of a GPU where tensors only pretend to be on one: a device to guard and a
// stream to order, neither of which does anything. Loaded before torch, so that its answers are taken.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct NoDevice : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, NoDevice);

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

std::optional<DeviceType> accelerator::getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace at
