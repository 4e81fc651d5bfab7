// The fake device itself: knobs, clock, streams and events, random generator, and the hooks that torch calls.
#include "fake.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

namespace fake {

// ---- knobs and counters

Knobs& knobs() {
  static Knobs all;
  return all;
}

bool lacks(Lack what) {
  return knobs().lacking & what;
}

void need(Lack what, const char* function) {
  TORCH_CHECK_NOT_IMPLEMENTED(!lacks(what), "fake: this device has no ", function);
}

void check_alive() {
  TORCH_CHECK(knobs().present, "fake error: no device is present");
  if (knobs().lost)
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "fake error: device lost");
}

namespace {
std::mutex counts_mutex;
std::map<std::string, int64_t> counts;
std::atomic<uint64_t> noise_state{0};
}  // namespace

void count(const std::string& name) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts[name]++;
}

int64_t counted(const std::string& name) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  auto found = counts.find(name);
  return found == counts.end() ? 0 : found->second;
}

uint64_t next_noise() {
  // One step of splitmix64.
  uint64_t z = noise_state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

void reset_noise() {
  noise_state = 0;
}

// ---- the clock

Timeline& timeline() {
  static Timeline one;
  return one;
}

void Timeline::launch(int64_t bytes, double flops) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ += speed_.launch_ns;
  double work = std::max(speed_.ns_per_byte * static_cast<double>(bytes), speed_.ns_per_flop * flops);
  device_ = std::max(device_, host_) + speed_.kernel_ns + std::llround(work);
}

int64_t Timeline::mark() {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ += kTick;
  return device_ = std::max(device_, host_);
}

void Timeline::wait(int64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ = std::max(host_ + kTick, position);
}

void Timeline::wait_for_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ = std::max(host_ + kTick, device_);
}

bool Timeline::reached(int64_t position) {
  return now() >= position;
}

int64_t Timeline::now() {
  std::lock_guard<std::mutex> lock(mutex_);
  return host_ += kTick;
}

void Timeline::host_work(int64_t ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ += ns;
}

void Timeline::set_speed(const Speed& speed) {
  std::lock_guard<std::mutex> lock(mutex_);
  speed_ = speed;
}

// ---- storages

void resize_storage(const c10::Storage& storage, size_t size) {
  auto memory = allocator().allocate(size);
  if (size_t kept = std::min(size, storage.nbytes()))
    std::memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(size);
}

namespace {

void synchronize() {
  check_alive();
  count("synchronize");
  timeline().wait_for_all();
}

// ---- the generator

// A generator of the CPU with the device's name: kernels run on the CPU, and draw from it there.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator host)
      : GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host_(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host_.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host_.get_offset();
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }
  const at::Generator& host() const {
    return host_;
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(host_.clone());
  }

  at::Generator host_;
};

}  // namespace

at::Generator make_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator());
}

const at::Generator& default_generator() {
  static at::Generator one = make_generator();
  return one;
}

at::Generator host_generator(const std::optional<at::Generator>& generator) {
  const at::Generator& asked = generator && generator->defined() ? *generator : default_generator();
  TORCH_CHECK(
      asked.device().type() == kDevice, "Expected a 'fake' device type for generator but found '",
      asked.device().type(), "'");
  return static_cast<Generator*>(asked.unsafeGetGeneratorImpl())->host();
}

namespace {

// ---- streams and events

struct Event {
  int64_t position = 0;
};

thread_local c10::StreamId current_stream = 0;
std::atomic<int> times_counted{0};
std::atomic<bool> starting_threads{false};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    times_counted++;
    return knobs().present || starting_threads ? 1 : 0;
  }
#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }
#endif

  c10::Stream stream(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
  }
  c10::Stream getStream(c10::Device) const override {
    return stream(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  bool queryStream(const c10::Stream&) const override {
    return timeline().reached(timeline().mark());
  }
  void synchronizeStream(const c10::Stream&) const override {
    synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    synchronize();
  }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    need(kEvents, "events");
    check_alive();
    count("Event.record");
    if (!*event)
      *event = new Event();
    static_cast<Event*>(*event)->position = timeline().mark();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    count("Event.query");
    return !event || timeline().reached(static_cast<Event*>(event)->position);
  }
  void synchronizeEvent(void* event) const override {
    check_alive();
    count("Event.synchronize");
    if (event)
      timeline().wait(static_cast<Event*>(event)->position);
  }
  // torch has asked before whether both events are done.
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    count("Event.elapsed_time");
    auto ns = static_cast<Event*>(to)->position - static_cast<Event*>(from)->position;
    return static_cast<double>(ns) / 1e6;
  }
};

const c10::impl::DeviceGuardImplRegistrar guard_registered(kDevice, new Guard());

// ---- pinned memory: the CPU's, by a list of what was given out

class Pinned final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t size) override {
    check_alive();
    auto* memory = c10::GetAllocator(c10::kCPU)->raw_allocate(size);
    std::lock_guard<std::mutex> lock(mutex_);
    pointers_.insert(memory);
    return {memory, memory, raw_deleter(), c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool holds(const void* pointer) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return pointers_.count(const_cast<void*>(pointer));
  }
  void drop(void* pointer) {
    std::unique_lock<std::mutex> lock(mutex_);
    pointers_.erase(pointer);
    lock.unlock();
    c10::GetAllocator(c10::kCPU)->raw_deallocate(pointer);
  }

 private:
  mutable std::mutex mutex_;
  std::set<void*> pointers_;
};

Pinned& pinned() {
  static auto* one = new Pinned();
  return *one;
}

at::DeleterFnPtr Pinned::raw_deleter() const {
  return [](void* pointer) { pinned().drop(pointer); };
}

// ---- what torch asks of an accelerator

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return knobs().present;
  }
  bool isAvailable() const override {
    return knobs().present;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return knobs().present && allocator().initialized();
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return knobs().present ? 1 : 0;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return the_device();
  }
  bool isPinnedPtr(const void* pointer) const override {
    return pinned().holds(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    check_alive();
    return &pinned();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return make_generator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

}  // namespace
}  // namespace fake

// Members of torch::autograd::Engine, by their linker names: its header takes seconds to compile.
extern "C" {
void* _ZN5torch8autograd6Engine18get_default_engineEv();
void _ZN5torch8autograd6Engine20start_device_threadsEv(void*);
void _ZN5torch8autograd6Engine30initialize_device_threads_poolEv(void*);
}

extern "C" {

// Register the device's hooks, and start the thread that runs its backward passes.
void fake_register() {
  static auto* hooks = new fake::Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  fake::starting_threads = true;
  void* engine = _ZN5torch8autograd6Engine18get_default_engineEv();
  int before = fake::times_counted;
  _ZN5torch8autograd6Engine30initialize_device_threads_poolEv(engine);
  // The engine counts devices once, at the first backward pass of the process; if that is past, count again.
  if (fake::times_counted == before)
    _ZN5torch8autograd6Engine20start_device_threadsEv(engine);
  fake::starting_threads = false;
}

void fake_present(int on) {
  fake::knobs().present = on;
}
void fake_lost(int on) {
  fake::knobs().lost = on;
}
void fake_noise(int on) {
  fake::knobs().noise = on;
  fake::reset_noise();
}
void fake_lack(int what) {
  fake::knobs().lacking = what;
}
int fake_synchronize() {
  if (fake::knobs().lost)
    return 0;
  fake::synchronize();
  return 1;
}
void fake_count(const char* name) {
  fake::count(name);
}
int64_t fake_counted(const char* name) {
  return fake::counted(name);
}
void fake_clear_counts() {
  std::lock_guard<std::mutex> lock(fake::counts_mutex);
  fake::counts.clear();
}
// Names of what was called, one a line; returns the size that they take.
int64_t fake_count_names(char* to, int64_t size) {
  std::lock_guard<std::mutex> lock(fake::counts_mutex);
  std::string names;
  for (const auto& [name, _] : fake::counts)
    names += name + "\n";
  if (static_cast<int64_t>(names.size()) < size)
    std::memcpy(to, names.c_str(), names.size() + 1);
  return static_cast<int64_t>(names.size()) + 1;
}
int64_t fake_clock() {
  return fake::timeline().now();
}
void fake_host_work(int64_t ns) {
  fake::timeline().host_work(ns);
}
void fake_speed(int64_t launch_ns, int64_t kernel_ns, double ns_per_byte, double ns_per_flop) {
  fake::timeline().set_speed({launch_ns, kernel_ns, ns_per_byte, ns_per_flop});
}
}
