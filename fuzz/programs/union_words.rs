//! libFuzzer feeds `nacre_fuzz::union_words`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::union_words(data));
