// Shape and dtype contracts of backend.h, checked by every backend before it touches memory. Each throws Error(internal) that names the
// kernel and the operand.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

void check(const Fill& k);
void check(const Convert& k);
void check(const RandomNormal& k);
void check(const Add& k);
void check(const Gemm& k);
void check(const Quantize& k);
void check(const Dequantize& k);
void check(const FakeQuantize& k);
void check(const RequantizeColumns& k);
void check(const SwizzleScales& k);
void check(const QuantizationError& k);
void check(const SumRows& k);
void check(const EmbeddingForward& k);
void check(const EmbeddingBackward& k);
void check(const RmsNormForward& k);
void check(const RmsNormBackward& k);
void check(const LayerNormForward& k);
void check(const LayerNormBackward& k);
void check(const QkNormForward& k);
void check(const QkNormBackward& k);
void check(const Rope& k);
void check(const AttentionForward& k);
void check(const AttentionBackward& k);
void check(const CachedAttention& k);
void check(const SwiGluForward& k);
void check(const SwiGluBackward& k);
void check(const GeluForward& k);
void check(const GeluBackward& k);
void check(const CrossEntropy& k);
void check(const AdamW& k);
void check(const FinishGradients& k);
void check(const Sum& k);
void check(const SquaredNorm& k);

}  // namespace mantissa
