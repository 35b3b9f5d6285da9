// What torch asks of a device: see device.cpp.
namespace sim {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static Stream stream(int id) { return Stream(Stream::UNSAFE, DEVICE, id); }
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override {
    Lock lock(state_mutex);
    all_streams().push_back(new StreamThread(all_streams().size()));
    return stream(all_streams().back()->id);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override { return stream(std::exchange(current, (int)next.id())); }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)(intptr_t)s.id(); }
  bool queryStream(const Stream& s) const override { return stream_of(s.id())->idle(); }
  void synchronizeStream(const Stream& s) const override { wait_on_host(stream_of(s.id())); }
  void synchronizeDevice(const DeviceIndex) const override {
    std::vector<StreamThread*> all;
    {
      Lock lock(state_mutex);
      all = all_streams();
    }
    for (auto* one : all) wait_on_host(one);
  }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *(Event*)*event = record_event(stream_of(s.id()));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  void block(void* event, const Stream& s) const override {
    if (!event) return;
    auto state = *(Event*)event;
    auto* stream = stream_of(s.id());
    {
      Lock lock(state_mutex);
      merge_into(stream->known, state->known);
    }
    stream->push([state] { state->wait(); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& state = *(Event*)event;
    if (!state->query()) return false;
    Lock lock(state_mutex);
    merge_into(host, state->known);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto state = *(Event*)event;
    state->wait();
    Lock lock(state_mutex);
    count_wait();
    merge_into(host, state->known);
  }

  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { keep(p.get(), s.id()); }
  static void keep(const void* p, int stream) {
    Lock lock(state_mutex);
    auto it = containing(blocks, (const char*)p);
    if (p && it != blocks.end() && it->second.stream != stream) it->second.users.insert(stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override {
    Lock lock(state_mutex);
    return is_pinned(p, 1);
  }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();  // the same random numbers as on the CPU
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto next = allocator.allocate(nbytes);
    auto both = std::min(nbytes, storage.nbytes());
    if (both) {
      wait_on_host(stream_of(current));
      std::memcpy(real(next.get()), real(storage.data()), both);
    }
    impl->set_data_ptr_noswap(std::move(next));
    impl->set_nbytes(nbytes);
  }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace sim
