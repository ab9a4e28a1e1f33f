// Norms, activations and rotation: what a decoder layer does between its large products.
#include "kernels/entry_points.hpp"
#include "kernels/vec.hpp"

namespace pagemill::PAGEMILL_ISA {
namespace {

// Root-mean-square norm of n floats, in place or not.
void norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    Vec squares{};
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    for (int64_t i = 0; i < whole; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const Vec last = load_some(x + whole, rest);
    squares = fma(last, last, squares);
    const float mean = sum(squares) / static_cast<float>(n);
    const Vec factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < whole; i += kLanes) {
        store(out + i, load(x + i) * factor * load(weight + i));
    }
    store_some(out + whole, last * factor * load_some(weight + whole, rest), rest);
}

// x / (1 + e^-x)
Vec silu(Vec x) {
    Vec power = x * broadcast(-1.44269504f);
    power = power > broadcast(126.0f) ? broadcast(126.0f) : power;
    return x / (broadcast(1.0f) + exp2(power));
}

// The tanh form of GELU: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
Vec gelu_tanh(Vec x) {
    const Vec cube = x * x * x;
    const Vec inner = broadcast(0.797884561f) * fma(broadcast(0.044715f), cube, x);
    return broadcast(0.5f) * x * (broadcast(1.0f) + tanh(inner));
}

template <Vec (*kFunction)(Vec)>
void gate_row(const float *gate, const float *up, int64_t n, float *out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, kFunction(load(gate + i)) * load(up + i));
    if (i == n) return;
    const Vec last = kFunction(load_some(gate + i, n - i)) * load_some(up + i, n - i);
    store_some(out + i, last, n - i);
}

// Pairs (i, i + half) of one head, by the angle of pair i.
void rotate_head(float *x, const float *cosine, const float *sine, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + half + i);
        const Vec c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

void rotate_heads(const Rotation &rotation, float *x, int num_heads, const float *norm,
                  const float *angles) {
    const int dim = rotation.head_dim, half = rotation.rotary_dim / 2;
    for (int head = 0; head < num_heads; ++head, x += dim) {
        if (norm) norm_row(x, norm, rotation.norm_eps, dim, x);
        rotate_head(x, angles, angles + half, half);
    }
}

}  // namespace

void rotate(const Rotation &rotation, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        const float *angles = rotation.table + int64_t{rotation.positions[t]} * rotation.rotary_dim;
        rotate_heads(rotation, rotation.q + t * rotation.stride, rotation.num_heads,
                     rotation.q_norm, angles);
        rotate_heads(rotation, rotation.k + t * rotation.stride, rotation.num_kv_heads,
                     rotation.k_norm, angles);
    }
}

void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *out, int64_t begin,
              int64_t end) {
    for (int64_t t = begin; t < end; ++t) norm_row(x + t * n, weight, eps, n, out + t * n);
}

void activate(Activation kind, const float *gate_up, int64_t n, float *out, int64_t begin,
              int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        const float *gate = gate_up + t * 2 * n;
        if (kind == Activation::kSilu) {
            gate_row<silu>(gate, gate + n, n, out + t * n);
        } else {
            gate_row<gelu_tanh>(gate, gate + n, n, out + t * n);
        }
    }
}

}  // namespace pagemill::PAGEMILL_ISA
