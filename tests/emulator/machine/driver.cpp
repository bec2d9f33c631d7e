// What of driver.h needs no types of a kernel.
#include "driver.h"

#include <algorithm>
#include <numeric>

namespace {
int planted_fault;
}
bool emulator::planted(int fault) { return fault == planted_fault; }
void emulator::plant(int fault) { planted_fault = fault; }

namespace driver {

Arguments::Arguments(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    const std::string a = argv[i];
    values[a.substr(0, a.find('='))] = atoi(a.c_str() + a.find('=') + 1);
  }
}

int Arguments::operator[](const char* name) const {
  const auto found = values.find(name);
  if (found == values.end()) throw emulator::Error(std::string("missing argument ") + name);
  return found->second;
}

emulator::Options Arguments::options() const {
  emulator::Options o;
  o.order = static_cast<emulator::Order>((*this)["order"]);
  o.seed = static_cast<uint64_t>((*this)["shuffle"]);
  o.eager_copies = (*this)["eager"] != 0;
  return o;
}

std::vector<int> ordered(const int* offsets, int items) {
  const auto rows = [=](int item) { return offsets[item + 1] - offsets[item]; };
  std::vector<int> x(static_cast<size_t>(items));
  std::iota(x.begin(), x.end(), 0);
  std::stable_sort(x.begin(), x.end(), [&](int i, int j) { return rows(i) > rows(j); });
  for (int i = 0, end = 0; i <= items; i++) {
    x.push_back(end);
    if (i < items) end += rows(x[static_cast<size_t>(i)]);
  }
  return x;
}

int run(int argc, char** argv, const std::function<void(const Arguments&)>& body) {
  try {
    const Arguments arguments(argc, argv);
    emulator::plant(arguments.values.contains("fault") ? arguments["fault"] : 0);
    body(arguments);
    const auto& s = emulator::stats();
    const auto print = [](const char* name, uint64_t x) {
      fprintf(stderr, "%s=%llu ", name, static_cast<unsigned long long>(x));
    };
    print("mma", s.mma), print("ldmatrix", s.ldmatrix), print("phases", s.ldmatrix_phases), print("copies", s.copies);
    print("copied", s.copied_bytes);
    return 0;
  } catch (const emulator::Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}

}  // namespace driver
