// What can go wrong below Python: one type for each thing that a caller treats differently.
#pragma once

#include <stdexcept>
#include <string>

namespace harli {

// Sizes or options that no pool can have; the Python side sees harli_core.errors.ConfigError.
struct ConfigError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A request that the tables do not allow (a double free, say); they are as they were.
struct StateError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// No room for an allocation; the tables are as they were.
struct OutOfMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A driver call failed; whoever made it has undone what it had done before.
struct DriverError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace harli
