// Threads allocate, write, check, free, lend and give back over the host driver; built under sanitizers (CMakeLists.txt).
// Exits 0 if every byte was as its writer left it and nothing is left over.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "host_driver.hpp"
#include "tensor_space.hpp"
#include "torch_entry.hpp"

using namespace harli;

namespace {

std::atomic<int> failures{0};

void expect(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "stress: %s\n", what);
    ++failures;
}

struct Piece {
    unsigned char* bytes;
    size_t size;
    unsigned char pattern;
    Stream stream;
};

bool intact(const Piece& piece) {
    for (size_t at = 0; at < piece.size; at += 509) {
        if (piece.bytes[at] != piece.pattern) return false;
    }
    return piece.bytes[piece.size - 1] == piece.pattern;
}

void churn(TensorSpace& space, unsigned seed, int steps) {
    std::minstd_rand random(seed);
    std::vector<Piece> live;
    for (int step = 0; step < steps; ++step) {
        const Stream stream = 1 + random() % 3;
        if (live.size() < 24 && random() % 5 < 3) {
            const size_t size = random() % 8 == 0 ? 1 + random() % 200000 : 1 + random() % 9000;
            try {
                auto* const bytes = reinterpret_cast<unsigned char*>(space.allocate(size, stream));
                const auto pattern = static_cast<unsigned char>(random());
                std::memset(bytes, pattern, size);
                live.push_back({bytes, size, pattern, stream});
            } catch (const OutOfMemory&) {
            }
        } else if (!live.empty()) {
            const size_t which = random() % live.size();
            const Piece piece = live[which];
            live[which] = live.back();
            live.pop_back();
            expect(intact(piece), "an allocation was overwritten");
            const auto address = reinterpret_cast<Address>(piece.bytes);
            if (random() % 4 == 0) space.record_use(address, 1 + random() % 3);
            space.free(address, piece.stream);
        }
        if (step % 16 == 0) space.poll();
    }
    for (const Piece& piece : live) space.free(reinterpret_cast<Address>(piece.bytes), piece.stream);
}

// Takes idle rows away and brings others, as a scheduler does at step boundaries.
void trade_rows(PagePool& pool, TensorSpace& space, const std::atomic<bool>& stop) {
    std::minstd_rand random(99);
    std::vector<uint32_t> home;
    while (!stop) {
        space.poll();
        const auto rows = space.rows();
        if (!rows.empty() && rows.size() > 3) space.close_row(rows[random() % rows.size()]);
        for (const uint32_t row : space.rows_empty()) {
            try {
                if (random() % 2 == 0) space.scrub_row(row, 0xFFFF, 7);
                space.remove_row(row);
            } catch (const StateError&) {  // another thread allocated there just now
                continue;
            }
            pool.return_row(row, 0xFFFF, 7);
            const auto* const word = reinterpret_cast<const uint16_t*>(pool.kv_address(0, row));
            expect(*word == 0xFFFF, "a row came back without its poison");
            home.push_back(row);
            break;
        }
        if (home.size() > 2) {
            const uint32_t row = home.front();
            home.erase(home.begin());
            pool.lend_row(row);
            space.add_row(row);
        }
        for (const uint32_t row : space.rows()) {
            if (random() % 4 == 0) space.open_row(row);
        }
        expect(space.stats().fragmentation_bytes < pool.grid().blocks() * pool.grid().block_bytes, "impossible figures");
        std::this_thread::yield();
    }
}

void stress(Lending lending, int steps) {
    auto driver = std::make_shared<HostDriver>(4096);
    {
        auto pool = std::make_shared<PagePool>(driver, Grid{12, 4, 32768}, lending);
        auto space = std::make_shared<TensorSpace>(pool, 2048);
        for (uint32_t row = 0; row < 12; ++row) pool->commit_row(row, 0xFFFF, 7);
        for (uint32_t row = 2; row < 12; ++row) {
            pool->lend_row(row);
            space->add_row(row);
        }
        bind_torch_space(space);
        std::atomic<bool> stop{false};
        std::vector<std::thread> threads;
        for (unsigned seed = 1; seed <= 3; ++seed) {
            threads.emplace_back([&space, seed, steps] { churn(*space, seed, steps); });
        }
        threads.emplace_back([steps] {
            for (int step = 0; step < steps / 4; ++step) {
                void* const address = harli_torch_malloc(5000, 0, nullptr);
                if (address == nullptr) continue;
                std::memset(address, 1, 5000);
                harli_torch_free(address, 5000, 0, nullptr);
            }
        });
        std::thread trader([&] { trade_rows(*pool, *space, stop); });
        for (auto& thread : threads) thread.join();
        stop = true;
        trader.join();
        bind_torch_space(nullptr);
        space->poll();
        space->poll();
        space->check_integrity();
        pool->check_integrity();
        expect(space->stats().live == 0 && space->stats().pending_bytes == 0, "something is left in the tensor space");
    }
    expect(driver->use() == HostUse{}, "the pool leaked driver objects");
}

// Every driver call of a pool's life fails once, at every position; its blocks are created ahead, or as rows are committed.
void fail_everywhere(Lending lending, bool ahead) {
    for (size_t kind = 0; kind < call_names.size(); ++kind) {
        for (int64_t nth = 0; nth < 40; ++nth) {
            auto driver = std::make_shared<HostDriver>(4096);
            driver->ledger().fail(static_cast<Call>(kind), nth, 1);
            std::shared_ptr<PagePool> pool;
            try {
                pool = std::make_shared<PagePool>(driver, Grid{3, 2, 8192}, lending);
                TensorSpace space(pool, 2048);
                if (ahead) pool->create_blocks();
                for (uint32_t row = 0; row < 3; ++row) pool->commit_row(row, 0xFFFF, 7);
                pool->lend_row(1);
                space.add_row(1);
                space.free(space.allocate(3000, 1), 2);
                space.poll();
                space.poll();
                space.scrub_row(1, 0xFFFF, 1);
                space.remove_row(1);
                pool->return_row(1, 0, 1);
                pool->lend_row(2);
                pool->return_row(2, 0, 1);
            } catch (const DriverError&) {
            }
            if (pool != nullptr && pool->release() > 0) expect(pool->release() == 0, "a second release kept something");
            expect(driver->use() == HostUse{}, "a fault leaked");
        }
    }
}

}  // namespace

int main() {
    for (const Lending lending : {Lending::alias, Lending::remap}) {
        stress(lending, 40000);
        for (const bool ahead : {false, true}) fail_everywhere(lending, ahead);
    }
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
