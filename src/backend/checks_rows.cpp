// Contracts of the kernels that work on rows of channels or of packed heads: norms, rotary embedding, attention.
#include "backend/checks.h"
#include "backend/contract.h"

namespace mantissa {
namespace {

void matrix(Contract& contract, const char* operand, const Tensor& tensor) {
  contract.input(operand, tensor).floating(operand, tensor).rank(operand, tensor, 2);
}

void packed_heads(Contract& contract, const char* operand, const Tensor& tensor, const HeadLayout& layout) {
  matrix(contract, operand, tensor);
  contract.that(layout.heads > 0 && layout.kv_heads > 0 && layout.head_dim > 0 && layout.heads % layout.kv_heads == 0, "layout has ",
                layout.heads, " query heads, ", layout.kv_heads, " key heads of ", layout.head_dim, " channels");
  contract.that(tensor.dim(1) == layout.row(), operand, " is ", tensor.shape(), ", but a row of the layout has ", layout.row(),
                " elements");
}

// The sequence length.
int64_t sequences(Contract& contract, const Tensor& qkv, int64_t batch, const Tensor& segment_starts) {
  contract.that(batch > 0 && qkv.dim(0) % batch == 0, "qkv has ", qkv.dim(0), " rows, not ", batch, " sequences of one length");
  contract.optional_input("segment_starts", segment_starts, Dtype::i32, {qkv.dim(0)});
  return qkv.dim(0) / batch;
}

}  // namespace

void check(const RmsNormForward& k) {
  Contract contract("rms_norm");
  matrix(contract, "x", k.x);
  const Dtype dtype = k.x.dtype();
  contract.input("weight", k.weight, dtype, {k.x.dim(1)});
  contract.output("y", k.y, dtype, k.x.shape()).output("rstd", k.rstd, stats_dtype(dtype), {k.x.dim(0)});
}

void check(const RmsNormBackward& k) {
  Contract contract("rms_norm backward");
  matrix(contract, "x", k.x);
  const Dtype dtype = k.x.dtype(), stats = stats_dtype(dtype);
  contract.input("weight", k.weight, dtype, {k.x.dim(1)}).input("rstd", k.rstd, stats, {k.x.dim(0)});
  contract.input("dy", k.dy, dtype, k.x.shape()).output("dx", k.dx, dtype, k.x.shape());
  contract.output("dweight", k.dweight, stats, {k.x.dim(1)});
}

void check(const LayerNormForward& k) {
  Contract contract("layer_norm");
  matrix(contract, "x", k.x);
  const Dtype dtype = k.x.dtype(), stats = stats_dtype(dtype);
  contract.input("weight", k.weight, dtype, {k.x.dim(1)}).optional_input("bias", k.bias, dtype, {k.x.dim(1)});
  contract.output("y", k.y, dtype, k.x.shape());
  contract.output("mean", k.mean, stats, {k.x.dim(0)}).output("rstd", k.rstd, stats, {k.x.dim(0)});
}

void check(const LayerNormBackward& k) {
  Contract contract("layer_norm backward");
  matrix(contract, "x", k.x);
  const Dtype dtype = k.x.dtype(), stats = stats_dtype(dtype);
  contract.input("weight", k.weight, dtype, {k.x.dim(1)});
  contract.input("mean", k.mean, stats, {k.x.dim(0)}).input("rstd", k.rstd, stats, {k.x.dim(0)});
  contract.input("dy", k.dy, dtype, k.x.shape()).output("dx", k.dx, dtype, k.x.shape());
  contract.output("dweight", k.dweight, stats, {k.x.dim(1)});
  if (k.dbias.defined()) contract.output("dbias", k.dbias, stats, {k.x.dim(1)});
}

void check(const QkNormForward& k) {
  Contract contract("qk_norm");
  packed_heads(contract, "x", k.x, k.layout);
  const Dtype dtype = k.x.dtype();
  contract.input("q_weight", k.q_weight, dtype, {k.layout.head_dim}).input("k_weight", k.k_weight, dtype, {k.layout.head_dim});
  contract.output("y", k.y, dtype, k.x.shape());
  contract.output("rstd", k.rstd, stats_dtype(dtype), {k.x.dim(0), k.layout.heads + k.layout.kv_heads});
}

void check(const QkNormBackward& k) {
  Contract contract("qk_norm backward");
  packed_heads(contract, "x", k.x, k.layout);
  const Dtype dtype = k.x.dtype(), stats = stats_dtype(dtype);
  contract.input("q_weight", k.q_weight, dtype, {k.layout.head_dim}).input("k_weight", k.k_weight, dtype, {k.layout.head_dim});
  contract.input("rstd", k.rstd, stats, {k.x.dim(0), k.layout.heads + k.layout.kv_heads});
  contract.input("dy", k.dy, dtype, k.x.shape()).output("dx", k.dx, dtype, k.x.shape());
  contract.output("dq_weight", k.dq_weight, stats, {k.layout.head_dim}).output("dk_weight", k.dk_weight, stats, {k.layout.head_dim});
}

void check(const Rope& k) {
  Contract contract("rope");
  packed_heads(contract, "x", k.x, k.layout);
  contract.that(k.layout.head_dim % 2 == 0, "head_dim is ", k.layout.head_dim, ", but channels are rotated in pairs");
  contract.input("table", k.table).rank("table", k.table, 2).has("table", k.table, Dtype::f32, {k.table.dim(0), k.layout.head_dim});
  contract.input("positions", k.positions, Dtype::i32, {k.x.dim(0)}).output("y", k.y, k.x.dtype(), k.x.shape());
}

void check(const AttentionForward& k) {
  Contract contract("attention");
  packed_heads(contract, "qkv", k.qkv, k.layout);
  const int64_t length = sequences(contract, k.qkv, k.batch, k.segment_starts);
  contract.output("out", k.out, k.qkv.dtype(), {k.qkv.dim(0), k.layout.heads * k.layout.head_dim});
  contract.output("lse", k.lse, stats_dtype(k.qkv.dtype()), {k.batch, k.layout.heads, length});
}

void check(const AttentionBackward& k) {
  Contract contract("attention backward");
  packed_heads(contract, "qkv", k.qkv, k.layout);
  const int64_t length = sequences(contract, k.qkv, k.batch, k.segment_starts);
  const Shape out{k.qkv.dim(0), k.layout.heads * k.layout.head_dim};
  contract.input("out", k.out, k.qkv.dtype(), out).input("dout", k.dout, k.qkv.dtype(), out);
  contract.input("lse", k.lse, stats_dtype(k.qkv.dtype()), {k.batch, k.layout.heads, length});
  contract.output("dqkv", k.dqkv, k.qkv.dtype(), k.qkv.shape());
}

void check(const CachedAttention& k) {
  Contract contract("cached_attention");
  packed_heads(contract, "qkv", k.qkv, k.layout);
  contract.output("keys", k.keys).rank("keys", k.keys, 2);
  const Shape cache{k.keys.dim(0), k.layout.kv_heads * k.layout.head_dim};
  contract.has("keys", k.keys, k.qkv.dtype(), cache).output("values", k.values, k.qkv.dtype(), cache);
  contract.that(k.first >= 0 && k.first + k.qkv.dim(0) <= k.keys.dim(0), "positions ", k.first, " to ", k.first + k.qkv.dim(0) - 1,
                " do not fit a cache of ", k.keys.dim(0));
  contract.output("out", k.out, k.qkv.dtype(), {k.qkv.dim(0), k.layout.heads * k.layout.head_dim});
}

}  // namespace mantissa
