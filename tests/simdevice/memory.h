// Device memory: see device.cpp.
namespace sim {

constexpr auto SIM = DeviceType::PrivateUse1;
constexpr size_t SPACE_NBYTES = size_t(16) << 30;  // of addresses; pages are allocated when they are written
const Device DEVICE(SIM, 0);

struct Memory {
  char *hidden, *real;
  Memory() {
    int fd = memfd_create("sim", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, SPACE_NBYTES) == 0, "sim: no memory");
    hidden = (char*)mmap(nullptr, SPACE_NBYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    real = (char*)mmap(nullptr, SPACE_NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK(hidden != MAP_FAILED && real != MAP_FAILED, "sim: cannot map memory");
    close(fd);
  }
};

Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

bool on_device(const void* p) { return p >= memory().hidden && p < memory().hidden + SPACE_NBYTES; }

// The address at which streams may use `p`, an address of the device or of the host.
char* real(const void* p) { return on_device(p) ? memory().real + ((const char*)p - memory().hidden) : (char*)p; }

bool on_sim(const at::Tensor& t) { return t.defined() && t.device().type() == SIM; }

// Bytes from the first to the last element.
size_t span(const at::Tensor& t) {
  return t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size()) : 0;
}

}  // namespace sim
