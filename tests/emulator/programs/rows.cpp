// Runs one of the kernels that work row by row (kernel=0 rotary, 1 RMS norm, 2 its gradients) in dtype 0 to 3 (Number);
// -DFLOAT_ALONE: in float.
// stdin, stdout: see each function.
#include "emulator/machine/driver.h"
//
#include "kernels/rows.h"

using namespace attnjourney;
using driver::Arguments;

template <class Kernel, class Task>
void run(Kernel kernel, int64_t blocks, int threads, const Arguments& a, const Task& p) {
  emulator::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), 0, a.options(), p);
}

// stdin: x [batch, heads, seq, dim], cos and sin [batch or 1, seq, half]; stdout: x turned
template <class T, int V>
void rotate(const Arguments& a) {
  const driver::Shape shape{a["batch"], a["heads"], a["seq"], a["dim"], a["rows_first"] != 0};
  const size_t table = static_cast<size_t>((a["own"] ? shape.batch : 1) * shape.length * a["half"]);
  emulator::Buffer<T> x(driver::read<T>(shape.size()), "x"), out(shape.size(), "out");
  emulator::Buffer<Compute<T>> cos(driver::read<Compute<T>>(table), "cos"), sin(driver::read<Compute<T>>(table), "sin");
  RotaryTask p{};
  p.x = a["in_place"] ? x.data : out.data, p.from = a["in_place"] ? nullptr : x.data;
  p.x_strides = p.from_strides = shape.strides<Strides>();
  p.cos = cos.data, p.sin = sin.data, p.table_batch = a["own"] ? int64_t{shape.length} * a["half"] : 0;
  p.positions = int64_t{shape.batch} * shape.length, p.seq = shape.length, p.heads = shape.heads;
  p.dim = shape.dim, p.half = a["half"], p.interleaved = a["interleaved"], p.inverse = a["inverse"];
  run(rotary<T, V>, rotary_blocks(p, V), kRotaryThreads, a, p);
  driver::write(a["in_place"] ? x : out);
}

// stdin: x [rows, x_row], weight [width], with given=1 rstd [rows]; stdout: y [rows, width], rstd
template <class T, int V>
void norm(const Arguments& a) {
  RmsTask p{};
  p.rows = a["rows"], p.width = a["width"], p.x_row = a["x_row"], p.out_row = p.width, p.given = a["given"],
  p.inverse_width = 1.0 / p.width;
  p.eps = a["eps"] / 1000.0;
  const auto rows = static_cast<size_t>(p.rows), width = static_cast<size_t>(p.width);
  emulator::Buffer<T> x(driver::read<T>(rows * static_cast<size_t>(p.x_row)), "x");
  emulator::Buffer<T> weight(driver::read<T>(width), "weight"), y(rows * width, "y");
  std::unique_ptr<emulator::Buffer<Compute<T>>> rstd;
  if (p.given)
    rstd = std::make_unique<emulator::Buffer<Compute<T>>>(driver::read<Compute<T>>(rows), "rstd");
  else
    rstd = std::make_unique<emulator::Buffer<Compute<T>>>(rows, "rstd");
  p.x = x.data, p.weight = weight.data, p.out = y.data, p.rstd = rstd->data;
  run(rms_forward<T, V>, rms_row_blocks(p), kRmsThreads, a, p);
  driver::write(y);
  driver::write(*rstd);
}

// stdin: x [rows, x_row], weight [width], grad_y [rows, width], rstd [rows]; stdout: grad_x [rows, width], grad_weight
template <class T, int V>
void gradients(const Arguments& a) {
  using C = Compute<T>;
  RmsTask p{};
  p.rows = a["rows"], p.width = a["width"], p.x_row = a["x_row"], p.out_row = p.width, p.inverse_width = 1.0 / p.width;
  p.span = a["span"], p.spans = static_cast<int>((p.rows + p.span - 1) / p.span);
  const auto rows = static_cast<size_t>(p.rows), width = static_cast<size_t>(p.width);
  emulator::Buffer<T> x(driver::read<T>(rows * static_cast<size_t>(p.x_row)), "x");
  emulator::Buffer<T> weight(driver::read<T>(width), "weight"), grad_y(driver::read<T>(rows * width), "grad_y");
  emulator::Buffer<C> rstd(driver::read<C>(rows), "rstd"), parts(static_cast<size_t>(p.spans) * width, "parts");
  emulator::Buffer<T> grad_x(rows * width, "grad_x"), grad_weight(width, "grad_weight");
  p.x = x.data, p.weight = weight.data, p.grad_y = grad_y.data, p.rstd = rstd.data;
  p.out = grad_x.data, p.parts = parts.data, p.grad_weight = grad_weight.data;
  run(rms_grad_x<T, V>, rms_row_blocks(p), kRmsThreads, a, p);
  run(rms_grad_weight_parts<T>, int64_t{p.spans} * rms_column_blocks(p), kRmsThreads, a, p);
  run(rms_grad_weight<T>, rms_column_blocks(p), kRmsThreads, a, p);
  driver::write(grad_x);
  driver::write(grad_weight);
}

template <class T, int V>
void pick(const Arguments& a) {
  const int kernel = a["kernel"];
  (kernel == 0 ? rotate<T, V> : kernel == 1 ? norm<T, V> : gradients<T, V>)(a);
}

template <class T>
void pick(const Arguments& a) {
  (a["vectors"] ? pick<T, kVector<T>> : pick<T, 1>)(a);
}

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const Arguments& a) {
    const auto number = static_cast<Number>(a["dtype"]);
#ifdef FLOAT_ALONE
    if (number == Number::fp32) pick<float>(a);
#else
    (number == Number::fp32   ? pick<float>
     : number == Number::fp64 ? pick<double>
     : number == Number::bf16 ? pick<Bf16>
                              : pick<Half>)(a);
#endif
  });
}
