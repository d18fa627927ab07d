// SM partitions: pairs of disjoint groups of streaming multiprocessors, each with a stream of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "driver.hpp"

namespace harli {

// One pair; the counts are what the hardware gave, not what was asked for. A stream of 0 means: no stream of its own.
struct SmPair {
    uint32_t decode_sms = 0;
    uint32_t finetune_sms = 0;
    Stream decode_stream = 0;
    Stream finetune_stream = 0;
};

// Pairs made once and kept until the object goes. Finetuning gets the aligned group of a split, decode the remainder.
// Work must have passed before the object goes.
class SmPartitions {
public:
    virtual ~SmPartitions() = default;
    SmPartitions() = default;
    SmPartitions(const SmPartitions&) = delete;
    SmPartitions& operator=(const SmPartitions&) = delete;

    uint32_t total_sms() const { return total_sms_; }
    const std::vector<SmPair>& pairs() const { return pairs_; }

protected:
    uint32_t total_sms_ = 0;
    std::vector<SmPair> pairs_;
};

// No hardware: counts as the SMs of a GPU of total_sms in groups of `granule` would give them, no streams.
class HostPartitions final : public SmPartitions {
public:
    HostPartitions(uint32_t total_sms, const std::vector<uint32_t>& finetune_sms, uint32_t granule);
};

#ifdef HARLI_WITH_CUDA
// Green contexts of the driver (CUDA 12.4 or newer); throws DriverError saying what is missing where there are none.
class CudaPartitions final : public SmPartitions {
public:
    CudaPartitions(int device, const std::vector<uint32_t>& finetune_sms);
    ~CudaPartitions() override;

private:
    struct Contexts;
    std::unique_ptr<Contexts> contexts_;
};
#endif

}  // namespace harli
