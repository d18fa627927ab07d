#include "driver.hpp"

namespace harli {

void Driver::require_home(const char* verb) const {
    if (at_home()) return;
    throw StateError(std::string("cannot ") + verb +
                     " in a forked child: the memory is its parent's; start workers by spawn, or make a driver here");
}

void Driver::enter(Call call) {
    require_home(call_names[static_cast<size_t>(call)].data());
    ledger_.enter(call);
}

}  // namespace harli
