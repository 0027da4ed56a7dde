//! How fast parity is computed and lost columns are computed again, by one thread: GiB of data a
//! second.
//!
//! `cargo run --release -p nacre-pool --example parity_speed`

#![allow(clippy::expect_used, reason = "a program for developers")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use nacre_pool::parity::{encode, reconstruct};

fn rate(data: usize, column: usize, mut work: impl FnMut()) -> f64 {
    let (begin, mut rounds) = (Instant::now(), 0u64);
    while begin.elapsed() < Duration::from_millis(300) {
        (0..64).for_each(|_| work());
        rounds += 64;
    }
    (rounds * (data * column) as u64) as f64 / begin.elapsed().as_secs_f64() / f64::from(1 << 30)
}

fn main() {
    for (data, parity, column) in [(4, 1, 32 << 10), (4, 2, 32 << 10), (4, 2, 4 << 10), (8, 3, 32 << 10)] {
        let mut columns = vec![vec![7u8; column]; data + parity];
        let whole = {
            let (data, parity) = columns.split_at_mut(data);
            let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
            rate(data.len(), column, || black_box(encode(black_box(&*data), &mut parity)).expect("a row"))
        };
        print!("{data}+{parity}, columns of {:2} KiB: encode {whole:.1}", column >> 10);
        let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(Vec::as_mut_slice).collect();
        for lost in [vec![0], vec![0, data], vec![0, 1], vec![0, 1, 2]] {
            if lost.len() <= parity {
                let rebuilt =
                    rate(data, column, || black_box(reconstruct(&mut slices, data, black_box(&lost))).expect("enough"));
                print!(", without {lost:?} {rebuilt:.1}");
            }
        }
        println!(" GiB/s");
    }
}
