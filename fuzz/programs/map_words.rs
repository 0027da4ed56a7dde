//! libFuzzer feeds `nacre_fuzz::map_words`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::map_words(data));
