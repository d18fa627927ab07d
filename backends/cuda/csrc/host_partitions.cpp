#include <string>

#include "errors.hpp"
#include "sm_partitions.hpp"

namespace harli {

HostPartitions::HostPartitions(uint32_t total_sms, const std::vector<uint32_t>& finetune_sms, uint32_t granule) {
    if (granule == 0) throw ConfigError("SM partitions: a group has at least one SM");
    total_sms_ = total_sms;
    for (const uint32_t asked : finetune_sms) {
        const uint32_t given = (asked + granule - 1) / granule * granule;
        if (asked == 0 || given >= total_sms) {
            throw ConfigError("SM partitions: cannot give finetuning " + std::to_string(asked) + " of " +
                              std::to_string(total_sms) + " SMs in groups of " + std::to_string(granule));
        }
        pairs_.push_back({total_sms - given, given, 0, 0});
    }
}

}  // namespace harli
