//! libFuzzer feeds `nacre_fuzz::fuse_mount_table`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::fuse_mount_table(data));
