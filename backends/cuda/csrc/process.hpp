// Which process this is: a forked child has copies of the tables, but shares the memory that they describe.
#pragma once

#include <cstdint>

namespace harli {

// Remembers the process that it was made in. Costs no system call to ask.
class HomeProcess {
public:
    HomeProcess() : forks_(forks_so_far()) {}
    bool here() const { return forks_so_far() == forks_; }

private:
    static uint32_t forks_so_far();  // that lie between the first process to ask and this one

    uint32_t forks_;
};

}  // namespace harli
