// Makes torch believe in CUDA devices, be it built for the CPU or for CUDA: hooks and a device guard that do nothing but keep the
// current device of each thread. With them autograd and autocast take tensors that say `cuda:N`. Loaded before torch; STANDIN_GPUS
// says how many there are.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>

using namespace c10;
using namespace c10::impl;

namespace {

thread_local DeviceIndex current = 0;

DeviceIndex count() {
  const char* devices = std::getenv("STANDIN_GPUS");
  return static_cast<DeviceIndex>(devices ? std::atoi(devices) : 0);
}

struct Guard : DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::CUDA, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  void synchronizeDevice(const DeviceIndex) const override {}

  // Whatever is asked of a device is done when the call returns: streams and events have nothing to order.
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int = 0) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

Guard guard;
DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// A CUDA build registers its own under the same name, with the default priority.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, REGISTRY_PREFERRED, CUDAHooks)

}  // namespace

extern "C" int standin_current_device() { return current; }
extern "C" void standin_register() { DeviceGuardImplRegistrar again(DeviceType::CUDA, &guard); }
extern "C" void standin_set_device(int device) { current = static_cast<DeviceIndex>(device); }
