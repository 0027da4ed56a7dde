//! Parity (Reed-Solomon as in raidz): up to three columns from which as many lost ones are reconstructed.
//!
//! Callers: groups of devices with parity. A row has `k` data columns and `p` parity columns, all of one length. Over
//! the field of 256 elements (polynomial 0x11d), parity column `j` is the sum of `g^i` times data column `i`, where
//! `g` is 1, 2 and 4 for `j` = 0, 1 and 2.
//!
//! Invariants:
//! - Any `p` columns of a row may be lost, data or parity (up to [`MOST_DATA`] data columns).
//! - No tables: columns are doubled and added in lanes that the compiler keeps in vector registers.

use std::fmt;

/// Maximum number of parity columns.
pub const MOST_PARITY: usize = 3;
/// Maximum number of data columns: the powers of each generator are distinct up to there.
pub const MOST_DATA: usize = 255;

const LANE: usize = 64;
type Lane = [u8; LANE];

/// Reason why columns cannot be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsolvable {
    /// More columns are lost than there are intact parity columns.
    TooManyLost,
    /// Columns of different lengths, too many columns, or a lost one that does not exist.
    Shape,
}

impl fmt::Display for Unsolvable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooManyLost => "more columns are lost than parity can give back",
            Self::Shape => "columns that are no row",
        })
    }
}

impl std::error::Error for Unsolvable {}

/// Computes the parity columns.
///
/// # Errors
/// [`Unsolvable::Shape`].
pub fn encode<D: AsRef<[u8]>>(data: &[D], parity: &mut [&mut [u8]]) -> Result<(), Unsolvable> {
    let length = data.first().map_or(0, |column| column.as_ref().len());
    let same =
        data.iter().all(|column| column.as_ref().len() == length) && parity.iter().all(|column| column.len() == length);
    if !same || data.len() > MOST_DATA || parity.len() > MOST_PARITY {
        return Err(Unsolvable::Shape);
    }
    // All parity columns in one pass, so that the data is read once.
    for at in (0..length).step_by(LANE) {
        let mut sums = [[0; LANE]; MOST_PARITY];
        let [p, q, r] = &mut sums;
        for column in data.iter().rev() {
            let lane = load(column.as_ref(), at);
            add(p, &lane);
            if parity.len() > 1 {
                double(q);
                add(q, &lane);
            }
            if parity.len() > 2 {
                double(r);
                double(r);
                add(r, &lane);
            }
        }
        for (column, sum) in parity.iter_mut().zip(&sums) {
            store(column, at, sum);
        }
    }
    Ok(())
}

/// Reconstructs lost columns of a row: the first `data` columns are data, the others parity; `lost` are column
/// numbers, whose content is ignored.
///
/// # Errors
/// [`Unsolvable`]; nothing is changed then.
pub fn reconstruct(columns: &mut [&mut [u8]], data: usize, lost: &[usize]) -> Result<(), Unsolvable> {
    let length = columns.first().map_or(0, |column| column.len());
    let parity = columns.len().checked_sub(data).ok_or(Unsolvable::Shape)?;
    let twice = (0..).zip(lost).any(|(at, column)| lost.iter().take(at).any(|before| before == column));
    if columns.iter().any(|column| column.len() != length)
        || data > MOST_DATA
        || parity > MOST_PARITY
        || twice
        || lost.iter().any(|column| *column >= columns.len())
    {
        return Err(Unsolvable::Shape);
    }
    if lost.len() > parity {
        return Err(Unsolvable::TooManyLost);
    }
    let lost_data: Vec<usize> = lost.iter().copied().filter(|column| *column < data).collect();
    let whole: Vec<u8> = (0..parity as u8).filter(|row| !lost.contains(&(data + usize::from(*row)))).collect();
    solve(columns, data, &lost_data, &whole, length);
    let (data, parity) = columns.split_at_mut(data);
    for (row, column) in (0..).zip(parity) {
        if lost.contains(&(data.len() + usize::from(row))) {
            for at in (0..length).step_by(LANE) {
                let sum = sum(data.iter().map(|column| Some(&**column)), row, at);
                store(column, at, &sum);
            }
        }
    }
    Ok(())
}

/// Reconstructs lost data columns from the others and from enough parity columns (`whole`).
fn solve(columns: &mut [&mut [u8]], data: usize, lost: &[usize], whole: &[u8], length: usize) {
    if lost.is_empty() {
        return;
    }
    // One equation per parity column: the lost columns times their powers are the parity column minus the sum over
    // the remaining data columns.
    let mut matrix = [[1, 0, 0], [0, 1, 0], [0, 0, 1]];
    for (equation, row) in matrix.iter_mut().zip(whole.iter().take(lost.len())) {
        *equation = [0; 3];
        for (factor, column) in equation.iter_mut().zip(lost) {
            *factor = power(1 << row, *column);
        }
    }
    let inverse = inverse(&matrix);
    let apart = match lost {
        [first, second] => power(power(2, *first) ^ power(2, *second), 254),
        _ => 0,
    };
    let mut targets: Vec<&mut [u8]> = Vec::new();
    for column in lost {
        targets.extend(columns.get_mut(*column).map(std::mem::take));
    }
    for at in (0..length).step_by(LANE) {
        let mut known = [[0; LANE]; MOST_PARITY];
        for (known, row) in known.iter_mut().zip(whole.iter().take(lost.len())) {
            // Taken columns are empty here, and count as zeros.
            let left = columns.iter().take(data).map(|column| (!column.is_empty()).then_some(&**column));
            *known = sum(left, *row, at);
            if let Some(parity) = columns.get(data + usize::from(*row)) {
                add(known, &load(parity, at));
            }
        }
        // The sum of two lost columns is known, and so is that of their products: one general multiplication gives
        // the second, and the sum the first.
        if let ([first, _], [0, 1, ..], [one, other]) = (lost, whole, targets.as_mut_slice()) {
            let [sum, mut second, _] = known;
            let mut first_of_both = sum;
            (0..*first).for_each(|_| double(&mut first_of_both));
            add(&mut second, &first_of_both);
            let mut found = [0; LANE];
            add_scaled(&mut found, &second, apart);
            store(other, at, &found);
            add(&mut found, &sum);
            store(one, at, &found);
            continue;
        }
        for (target, factors) in targets.iter_mut().zip(&inverse) {
            let mut found = [0; LANE];
            for (known, factor) in known.iter().zip(factors) {
                add_scaled(&mut found, known, *factor);
            }
            store(target, at, &found);
        }
    }
    for (column, target) in lost.iter().zip(targets) {
        if let Some(place) = columns.get_mut(*column) {
            *place = target;
        }
    }
}

/// Computes a lane of a parity column by Horner's rule, from the last data column on.
fn sum<'a>(data: impl DoubleEndedIterator<Item = Option<&'a [u8]>>, row: u8, at: usize) -> Lane {
    let mut sum = [0; LANE];
    for column in data.rev() {
        (0..row).for_each(|_| double(&mut sum));
        if let Some(column) = column {
            add(&mut sum, &load(column, at));
        }
    }
    sum
}

fn load(column: &[u8], at: usize) -> Lane {
    let rest = column.get(at..).unwrap_or_default();
    match rest.first_chunk() {
        Some(lane) => *lane,
        None => {
            let mut lane = [0; LANE];
            lane.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            lane
        }
    }
}

fn store(column: &mut [u8], at: usize, lane: &Lane) {
    let rest = column.get_mut(at..).unwrap_or_default();
    match rest.first_chunk_mut() {
        Some(to) => *to = *lane,
        None => rest.iter_mut().zip(lane).for_each(|(to, from)| *to = *from),
    }
}

#[inline(always)]
fn add(to: &mut Lane, lane: &Lane) {
    to.iter_mut().zip(lane).for_each(|(to, with)| *to ^= with);
}

/// Multiplies by 2: a shift, with the carry reduced by the polynomial.
#[inline(always)]
fn double(lane: &mut Lane) {
    for byte in lane {
        let back = if byte.cast_signed() < 0 { 0x1d } else { 0 };
        *byte = (*byte << 1) ^ back;
    }
}

#[inline(always)]
fn add_scaled(to: &mut Lane, lane: &Lane, factor: u8) {
    let (mut power, mut left) = (*lane, factor);
    while left != 0 {
        if left & 1 == 1 {
            add(to, &power);
        }
        left >>= 1;
        if left != 0 {
            double(&mut power);
        }
    }
}

fn times(a: u8, b: u8) -> u8 {
    let (mut product, mut power) = (0, a);
    for bit in 0..8 {
        if b >> bit & 1 == 1 {
            product ^= power;
        }
        power = (power << 1) ^ if power >> 7 == 1 { 0x1d } else { 0 };
    }
    product
}

fn power(base: u8, exponent: usize) -> u8 {
    (0..exponent % 255).fold(1, |power, _| times(power, base))
}

/// Inverts an invertible matrix by its cofactors. In this field signs make no difference.
fn inverse(matrix: &[[u8; 3]; 3]) -> [[u8; 3]; 3] {
    let [[a, b, c], [d, e, f], [g, h, i]] = *matrix;
    let minor = |a, b, c, d| times(a, d) ^ times(b, c);
    let cofactors = [
        [minor(e, f, h, i), minor(b, c, h, i), minor(b, c, e, f)],
        [minor(d, f, g, i), minor(a, c, g, i), minor(a, c, d, f)],
        [minor(d, e, g, h), minor(a, b, g, h), minor(a, b, d, e)],
    ];
    let [[x, ..], [y, ..], [z, ..]] = cofactors;
    let whole = power(times(a, x) ^ times(b, y) ^ times(c, z), 254);
    cofactors.map(|row| row.map(|factor| times(factor, whole)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Random;

    /// Parity by the definition, byte by byte.
    fn by_definition(data: &[Vec<u8>], row: u8) -> Vec<u8> {
        let byte =
            |at: usize| (0..).zip(data).fold(0, |sum, (column, bytes)| sum ^ times(bytes[at], power(1 << row, column)));
        (0..data[0].len()).map(byte).collect()
    }

    fn encoded(data: &[Vec<u8>], parity: usize) -> Vec<Vec<u8>> {
        let mut columns = vec![vec![0; data[0].len()]; parity];
        encode(data, &mut columns.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>()).unwrap();
        columns
    }

    fn row(random: &mut Random, data: usize, length: usize) -> Vec<Vec<u8>> {
        (0..data).map(|_| (0..length).map(|_| random.next() as u8).collect()).collect()
    }

    #[test]
    fn parity_is_what_the_definition_says() {
        let mut random = Random(1);
        for data in [1, 2, 3, 7, 16, 255] {
            let columns = row(&mut random, data, 150);
            for (number, parity) in (0..).zip(encoded(&columns, 3)) {
                assert_eq!(parity, by_definition(&columns, number), "{data} columns, parity {number}");
            }
        }
    }

    #[test]
    fn whatever_is_lost_comes_back() {
        let mut random = Random(2);
        let mut tried = 0;
        for data in 1..=16 {
            for parity in 1..=MOST_PARITY {
                // Not a whole number of lanes.
                let mut whole = row(&mut random, data, 77);
                whole.extend(encoded(&whole, parity));
                for mask in 0u32..1 << (data + parity) {
                    if mask.count_ones() as usize > parity {
                        continue;
                    }
                    let lost: Vec<usize> = (0..data + parity).filter(|at| mask >> at & 1 == 1).collect();
                    let mut columns = whole.clone();
                    lost.iter().for_each(|at| columns[*at].fill(0xdb));
                    let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(Vec::as_mut_slice).collect();
                    reconstruct(&mut slices, data, &lost).unwrap();
                    assert!(columns == whole, "{data}+{parity} without {lost:?}");
                    tried += 1;
                }
            }
        }
        assert_eq!(tried, 7_500, "every loss up to the parity, once");
    }

    #[test]
    fn the_widest_rows_can_lose_any_three() {
        let mut random = Random(3);
        let mut whole = row(&mut random, MOST_DATA, 3);
        whole.extend(encoded(&whole, 3));
        for _ in 0..3000 {
            let mut lost: Vec<usize> = (0..3).map(|_| random.below(258) as usize).collect();
            lost.sort_unstable();
            lost.dedup();
            let mut columns = whole.clone();
            lost.iter().for_each(|at| columns[*at].fill(0));
            let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(Vec::as_mut_slice).collect();
            reconstruct(&mut slices, MOST_DATA, &lost).unwrap();
            assert!(columns == whole, "without {lost:?}");
        }
    }

    #[test]
    fn what_is_no_row_is_refused() {
        let mut columns = vec![vec![1u8; 8]; 5];
        let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(Vec::as_mut_slice).collect();
        assert_eq!(reconstruct(&mut slices, 3, &[0, 1, 4]), Err(Unsolvable::TooManyLost));
        assert_eq!(reconstruct(&mut slices, 3, &[5]), Err(Unsolvable::Shape));
        assert_eq!(reconstruct(&mut slices, 3, &[1, 1]), Err(Unsolvable::Shape));
        assert_eq!(reconstruct(&mut slices, 6, &[]), Err(Unsolvable::Shape));
        assert_eq!(reconstruct(&mut slices, 1, &[0]), Err(Unsolvable::Shape), "four columns of parity");
        assert_eq!(encode(&[[0u8; 8], [0; 8]], &mut [&mut [0; 7]]), Err(Unsolvable::Shape));
        assert!(columns.iter().flatten().all(|byte| *byte == 1));
    }
}
