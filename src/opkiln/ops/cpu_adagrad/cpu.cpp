// Adagrad in place on host memory, and the inverse of a step. The arithmetic is reference.py's, in
// fp32 for all dtypes; narrow types are rounded once, when stored.

#include <opkiln/factor.h>
#include <opkiln/optimizing/host_step.h>
#include <opkiln/optimizing/kept_lists.h>
#include <opkiln/optimizing/status.h>

namespace {

using namespace opkiln;

enum : size_t { kParam, kGrad, kSum, kStreams };

struct Hyper {
  int64_t step;
  double lr, lr_decay, eps, weight_decay;
  bool maximize;
  double grad_scale;
};

// The coefficients of both directions, computed in double once per call.
struct Coefficients {
  explicit Coefficients(const Hyper& h)
      : grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        l2(h.weight_decay != 0),
        weight_decay(all(h.weight_decay)),
        step_size(all(h.lr / (1 + static_cast<double>(h.step - 1) * h.lr_decay))),
        eps(all(h.eps)) {}

  // The gradient that is squared and summed. With L2 it depends on the parameter before the step.
  Vec gradient(Vec grad, Vec param) const {
    return l2 ? multiply_add(weight_decay, param, grad) : grad;
  }

  Vec grad_factor;
  bool l2;
  Vec weight_decay, step_size, eps;
};

struct Step {
  const Coefficients& coefficients;

  template <class Streams>
  [[gnu::noinline]] void operator()(const Streams& at, int64_t count) const {
    const Coefficients c = coefficients;  // a local, so that the stores below cannot alias it
    const auto [params, grads, sums] = at;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      prefetch_all(params + i, grads + i, sums + i);
      Vec p = Vec::load(params + i);
      const Vec g = c.gradient(Vec::load(grads + i) * c.grad_factor, p);
      const Vec s = multiply_add(g, g, Vec::load(sums + i));
      p = p - c.step_size * g / (sqrt(s) + c.eps);
      p.store(params + i);
      s.store(sums + i);
    }
  }
};

struct Undo {
  const Coefficients& coefficients;

  [[gnu::noinline]] void operator()(float* const (&at)[kStreams], int64_t count) const {
    const Coefficients c = coefficients;
    const Vec zero = all(0), one = all(1);
    const auto [params, grads, sums] = at;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      const Vec root = sqrt(Vec::load(sums + i)) + c.eps;
      Vec g = Vec::load(grads + i) * c.grad_factor;
      Vec p = Vec::load(params + i) + c.step_size * g / root;
      if (c.l2) {
        p = p / (one - c.step_size * c.weight_decay / root);
      }
      g = c.gradient(g, p);
      // Rounding can make a small sum negative.
      const Vec s = at_least(zero, subtract_product(Vec::load(sums + i), g, g));
      p.store(params + i);
      s.store(sums + i);
    }
  }
};

OPK_PLAIN_BEGIN

StepLists<kStreams> lists_of(const TensorList& params, const TensorList& grads, const TensorList& sums,
                             const TensorList& copies) {
  return {{{"params", params}, {"grads", grads}, {"sums", sums}}, copies};
}

Hyper hyper_of(int64_t step, double lr, double lr_decay, double eps, double weight_decay,
               bool maximize, double grad_scale) {
  check_step(step);
  check_scale(grad_scale);
  return {step, lr, lr_decay, eps, weight_decay, maximize, grad_scale};
}

void cpu_adagrad_(TensorList& params, const TensorList& grads, TensorList& sums, TensorList& copies,
                  int64_t step, double lr, double lr_decay, double eps, double weight_decay,
                  bool maximize, double grad_scale) {
  const Hyper hyper = hyper_of(step, lr, lr_decay, eps, weight_decay, maximize, grad_scale);
  parallel_sweep<Step>(lists_of(params, grads, sums, copies).items(), Coefficients(hyper));
}

void cpu_adagrad_rollback_(TensorList& params, const TensorList& grads, TensorList& sums,
                           TensorList& copies, int64_t step, double lr, double lr_decay, double eps,
                           double weight_decay, bool maximize, double grad_scale) {
  const Hyper hyper = hyper_of(step, lr, lr_decay, eps, weight_decay, maximize, grad_scale);
  parallel_sweep<Undo>(lists_of(params, grads, sums, copies).items(), Coefficients(hyper));
}

Tensor cpu_adagrad_keep(const TensorList& params, const TensorList&, const TensorList& sums,
                        const TensorList& copies) {
  return KeptLists::keep({params, sums, copies});
}

int64_t cpu_adagrad_kept_(const Tensor& ticket, const TensorList& grads, int64_t step, double lr,
                          double lr_decay, double eps, double weight_decay, bool maximize,
                          double grad_scale) {
  const KeptLists::Kept kept(ticket);
  if (!kept) {
    return status::kNotKept;
  }
  const Hyper hyper = hyper_of(step, lr, lr_decay, eps, weight_decay, maximize, grad_scale);
  const auto items = lists_of(kept[0], grads, kept[1], kept[2]).items_if_laid_out_alike();
  if (!items) {
    return status::kLayout;
  }
  parallel_sweep<Step>(*items, Coefficients(hyper));
  return status::kMade;
}

void cpu_adagrad_forget(const Tensor& ticket) {
  KeptLists::forget(ticket);
}

// Sparse gradients

// A tensor whose gradient has only some of its rows: row r of the gradient belongs to row `indices[r]`.
struct Rows {
  Item<kStreams> item;  // numel counts the gradient's values
  const int64_t* indices;
  int64_t count, width;
};

OPK_PLAIN_END

template <class Body>
void sweep_rows(const Rows& rows, int64_t low, int64_t high, const Body& body) {
  const auto advance = [](Stream stream, int64_t elements) {
    if (stream.data != nullptr) {
      stream.data += elements * size_of(stream.type);
    }
    return stream;
  };
  for (int64_t r = low; r < high; ++r) {
    const int64_t there = rows.indices[r] * rows.width;
    Item<kStreams> row = rows.item;
    row.streams[kParam] = advance(row.streams[kParam], there);
    row.streams[kGrad] = advance(row.streams[kGrad], r * rows.width);
    row.streams[kSum] = advance(row.streams[kSum], there);
    row.copy = advance(row.copy, there);
    opkiln::sweep(row, 0, rows.width, body);
  }
}

OPK_PLAIN_BEGIN

void check_rows(const Tensor& tensor) {
  OPK_CHECK(tensor.is_contiguous(), tensor, " is not contiguous");
}

// Checks the indices: each must be below `rows`, in ascending order and without duplicates.
const int64_t* check_indices(const Tensor& indices, int64_t rows) {
  opk::check_on(indices, kHost);
  opk::check_dtype(indices, DType::int64);
  check_rows(indices);
  const int64_t* const at = indices.data<const int64_t>();
  for (int64_t r = 0, count = indices.numel(); rows != 0 && r < count; ++r) {
    OPK_CHECK(at[r] >= 0 && at[r] < rows, indices, " names row ", at[r], " of ", rows);
    OPK_CHECK(r == 0 || at[r] > at[r - 1], indices, " is not in ascending order without duplicates");
  }
  return at;
}

Rows rows_of(const Tensor& param, const Tensor& indices, const Tensor& values, const Tensor& sum,
             const Tensor* copy) {
  const Model model(param, kHost), value(values, kHost);
  Rows out;
  out.item.streams[kParam] = model.stream(param, true);
  check_rows(param);
  out.item.streams[kGrad] = value.stream(values, false);
  check_rows(values);
  out.item.streams[kSum] = model.state(sum);
  check_rows(sum);
  if (copy) {
    out.item.copy = model.stream(*copy, true);
    check_rows(*copy);
  }
  out.item.numel = value.numel();
  out.item.traffic = traffic(out.item);
  out.count = indices.numel();
  out.width = out.count == 0 ? 0 : value.numel() / out.count;
  OPK_CHECK(out.width * out.count == value.numel() && (out.width == 0 || model.numel() % out.width == 0),
            values, " has ", value.numel(), " elements, which are not ", out.count, " rows of ", param);
  out.indices = check_indices(indices, out.width == 0 ? 0 : model.numel() / out.width);
  return out;
}

template <class Body>
void step_rows(const TensorList& params, const TensorList& indices, const TensorList& values,
               const TensorList& sums, const TensorList& copies, const Hyper& hyper) {
  check_length("indices", indices, params);
  check_length("values", values, params);
  check_length("sums", sums, params);
  if (!copies.empty()) {
    check_length("copies", copies, params);
  }
  opk::List<Rows> all(params.size());
  for (int64_t i = 0; i < params.size(); ++i) {
    all[i] = rows_of(params[i], indices[i], values[i], sums[i], copies.empty() ? nullptr : &copies[i]);
  }
  const Coefficients coefficients(hyper);
  for (const Rows& rows : all) {
    if (rows.width == 0) {
      continue;
    }
    const int64_t grain = opk::kGrainBytes / (rows.width * rows.item.traffic) + 1;
    opk::parallel_for(0, rows.count, grain, [&](int64_t low, int64_t high) {
      sweep_rows(rows, low, high, Body{coefficients});
    });
  }
}

void cpu_adagrad_rows_(TensorList& params, const TensorList& indices, const TensorList& values,
                       TensorList& sums, TensorList& copies, int64_t step, double lr, double lr_decay,
                       double eps, bool maximize, double grad_scale) {
  step_rows<Step>(params, indices, values, sums, copies,
                  hyper_of(step, lr, lr_decay, eps, 0, maximize, grad_scale));
}

void cpu_adagrad_rows_rollback_(TensorList& params, const TensorList& indices, const TensorList& values,
                                TensorList& sums, TensorList& copies, int64_t step, double lr,
                                double lr_decay, double eps, bool maximize, double grad_scale) {
  step_rows<Undo>(params, indices, values, sums, copies,
                  hyper_of(step, lr, lr_decay, eps, 0, maximize, grad_scale));
}

OPKILN_OP(cpu_adagrad_, cpu);
OPKILN_OP(cpu_adagrad_rollback_, cpu);
OPKILN_OP(cpu_adagrad_keep, cpu);
OPKILN_OP(cpu_adagrad_kept_, cpu);
OPKILN_OP(cpu_adagrad_forget, cpu);
OPKILN_OP(cpu_adagrad_rows_, cpu);
OPKILN_OP(cpu_adagrad_rows_rollback_, cpu);

OPK_PLAIN_END

}  // namespace
