#include <cstring>

#include "cache/chain_hash.hpp"
#include "tests/check.hpp"

using namespace pagemill::cache;

static std::string hex(const Hash &hash) {
    std::string out;
    char two[3];
    for (uint8_t byte : hash) {
        std::snprintf(two, sizeof two, "%02x", byte);
        out += two;
    }
    return out;
}

static const uint8_t *bytes(const std::string &text) {
    return reinterpret_cast<const uint8_t *>(text.data());
}

static std::vector<sha256::Compress> paths() {
    std::vector<sha256::Compress> all = {sha256::compress_portable};
    if (sha256::has_instructions()) all.push_back(sha256::compress_instructions);
    return all;
}

// FIPS 180-4 example vectors.
TEST(sha256_known_vectors) {
    struct { std::string text; const char *digest; } known[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {std::string(1000000, 'a'),
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (auto path : paths())
        for (const auto &[text, digest] : known)
            CHECK(hex(sha256::digest(bytes(text), text.size(), path)) == digest);
}

TEST(sha256_paths_agree_on_every_length) {
    std::string text;
    for (int i = 0; i < 300; ++i) {
        Hash portable = sha256::digest(bytes(text), text.size(), sha256::compress_portable);
        for (auto path : paths()) CHECK(sha256::digest(bytes(text), text.size(), path) == portable);
        text += char(i * 37 + 11);
    }
}

// RFC 4231, cases 1, 2 and 6 (a key longer than a block).
TEST(hmac_known_vectors) {
    auto hmac = [](const std::string &key, const std::string &text) {
        return hex(sha256::hmac(bytes(key), key.size(), bytes(text), text.size()));
    };
    CHECK(hmac(std::string(20, '\x0b'), "Hi There") ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hmac("Jefe", "what do ya want for nothing?") ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    const char *text = "Test Using Larger Than Block-Size Key - Hash Key First";
    CHECK(hmac(std::string(131, '\xaa'), text) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(chain_hash_is_sha256_of_parent_and_tokens) {
    for (uint32_t block_size : {1u, 16u, 32u, 64u, 128u}) {
        std::vector<uint32_t> tokens(block_size);
        for (uint32_t i = 0; i < block_size; ++i) tokens[i] = i * 2654435761u;
        Hash parent = sha256::digest(bytes("p"), 1);
        std::vector<uint8_t> message(32 + 4 * block_size);
        std::memcpy(message.data(), parent.data(), 32);
        std::memcpy(message.data() + 32, tokens.data(), 4 * block_size);
        Hash expected = sha256::digest(message.data(), message.size());
        for (auto path : paths())
            CHECK(ChainHash(block_size, path)(parent, tokens.data()) == expected);
    }
}
